"""Search the largest batch whose peak stays below a limit, with few evaluations."""

from __future__ import annotations

from collections.abc import Callable

MOST_SAMPLES = 2**22
FINE = 64  # the result is exact to one part in FINE


def largest_that_fits(peak_of: Callable[[int], int], limit: int, start: int, most: int = MOST_SAMPLES) -> int:
    """Return a size whose peak is at most ``limit``, while a size about one part in FINE larger exceeds it.

    The result is 0 if one sample is too large, and ``most`` if all sizes fit. ``peak_of`` must not decrease.
    It is the maximum of straight lines (each moment of a step takes a constant plus an amount per sample). So
    the search interpolates linearly between two sizes, and bisects if that does not converge.
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
