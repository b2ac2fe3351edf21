"""Descriptors: block tables and strides become the rows and ids that one request moves."""
