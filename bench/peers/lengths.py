"""Typical lengths of reviews and instructions, and their grouping into batches by a trainer that pads."""

import math
import random


def drawn(mean, longest, count):
    """Draws lognormal lengths, truncated at `longest`, with the given mean: the median is found by bisection."""
    draw = random.Random(0)
    deviations = [draw.gauss(0, 0.6) for _ in range(count)]

    def lengths(median):
        return [max(8, min(longest, round(median * math.exp(d)))) for d in deviations]

    below, above = 1.0, 20.0 * longest
    for _ in range(40):
        middle = (below + above) / 2
        below, above = (middle, above) if sum(lengths(middle)) < mean * count else (below, middle)
    return lengths(above)


def grouped(lengths, rows):
    """Batches of similar lengths: sorted within 50 batches, as in Transformers' trainer, then shuffled."""
    batches = []
    for at in range(0, len(lengths), 50 * rows):
        some = sorted(lengths[at:at + 50 * rows], reverse=True)
        batches += [some[i:i + rows] for i in range(0, len(some) - rows + 1, rows)]
    random.Random(1).shuffle(batches)
    return batches
