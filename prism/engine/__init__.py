"""All compiled code: it knows arrays, not objects."""
