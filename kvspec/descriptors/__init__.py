"""Which bytes of a request: block tables and strides become descriptor rows, and ids."""
