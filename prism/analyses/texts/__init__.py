"""Answers in sentences: findings, advice, warnings, from the summaries; for terminals and plots."""
