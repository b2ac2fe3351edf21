"""Where bytes lie: layouts and tensors become a base and three strides for every part."""
