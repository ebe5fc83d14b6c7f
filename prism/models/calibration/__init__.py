"""A job calibrated to measured step times: what is fitted, and what stays the library's."""
