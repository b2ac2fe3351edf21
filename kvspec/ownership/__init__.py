"""Who owns what: intervals, tokens, deals of units to ranks, and the overlap of two deals.

Law: knows no kind of layer, no layout and no memory; ownership is input, never worked out by ratio.
"""
