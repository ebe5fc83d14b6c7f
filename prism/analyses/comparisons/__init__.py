"""What a comparison of two samples of step times is made of: see `prism.analyses.compare`."""
