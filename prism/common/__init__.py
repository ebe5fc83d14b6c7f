"""What every room uses: errors, files, units and numbers as text, statistics of samples."""
