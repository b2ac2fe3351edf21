"""Who owns what: intervals, tokens, shardings of units to ranks, and the overlap of two shardings.

Law: knows no kind of layer, no layout and no memory; ownership is input, never worked out by ratio.
"""
