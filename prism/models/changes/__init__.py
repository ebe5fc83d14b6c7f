"""What changes in a recording, and what is fitted without it."""
