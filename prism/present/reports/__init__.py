"""One page from results: what was asked, the answer in words, pictures, inputs, both errors."""
