"""Settings of a job side by side: which there are, what each is worth, which are the best."""
