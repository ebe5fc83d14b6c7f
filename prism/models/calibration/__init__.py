"""A job brought to measured step times: what is fitted, and what stays the library's."""
