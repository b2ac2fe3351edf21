"""When runs are short: whole ranges of the far side, permuted locally. What that is, and costs."""
