"""One file per analysis: makes its `prism.present.answer.Answer` from the result."""
