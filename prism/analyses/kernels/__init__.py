"""What a question about one kernel is made of: see `prism.analyses.kernel`."""
