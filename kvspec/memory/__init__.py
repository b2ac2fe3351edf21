"""Descriptions of where bytes lie: layouts and tensors become regions with four strides."""
