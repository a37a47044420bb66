"""The largest batch whose peak stays below a limit, asked for as few sizes as may be."""

from __future__ import annotations

from collections.abc import Callable

MOST_SAMPLES = 2**22
FINE = 64  # a size is found to one part in so many


def largest_that_fits(peak_of: Callable[[int], int], limit: int, start: int, most: int = MOST_SAMPLES) -> int:
    """A size whose peak is at most ``limit``, while one that is about a part in FINE larger is not; 0 where one sample is too many, ``most`` where all fit.

    ``peak_of`` never falls. It is the largest of several straight lines (each moment of a step takes so much and so much a sample), so between two sizes
    the straight line through them is tried first, and halves where that does not come nearer.
    """
    fits, fits_peak, too_large, too_large_peak = 0, 0, 0, 0
    size = max(1, min(start, most))
    for turn in range(200):
        peak = peak_of(size)
        if peak <= limit:
            fits, fits_peak = size, peak
        else:
            too_large, too_large_peak = size, peak
        if fits == most or (too_large and too_large - fits <= max(1, fits // FINE)):
            break
        if not too_large:
            size = min(most, max(2 * size, size * limit // max(1, peak) if turn % 2 == 0 else 0))
        elif not fits or turn % 2:
            size = (fits + too_large) // 2
        else:
            straight = fits + (too_large - fits) * (limit - fits_peak) // max(1, too_large_peak - fits_peak)
            size = min(max(straight, fits + 1), too_large - 1)
    return fits
