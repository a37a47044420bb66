"""Search the largest batch whose peak stays below a limit, with few evaluations."""

from collections.abc import Callable

MAX_SAMPLES = 2**22
RESOLUTION = 64  # the result is exact to one part in RESOLUTION


def largest_that_fits(
    peak_of: Callable[[int], int], limit: int, start: int, max_size: int = MAX_SAMPLES
) -> int:
    """A size whose peak is at most ``limit``, while a size one part in RESOLUTION larger exceeds it.

    The result is 0 if one sample is too large, ``max_size`` if all sizes fit. ``peak_of`` must not decrease. It
    is the maximum of straight lines (each moment of a step takes a constant plus an amount per sample). So
    the search interpolates linearly between two sizes, and bisects if that does not converge.
    """
    low, low_peak, high, high_peak = 0, 0, 0, 0
    size = max(1, min(start, max_size))
    for iteration in range(200):
        peak = peak_of(size)
        if peak <= limit:
            low, low_peak = size, peak
        else:
            high, high_peak = size, peak
        if low == max_size or (high and high - low <= max(1, low // RESOLUTION)):
            break
        if not high:
            size = min(max_size, max(2 * size, size * limit // max(1, peak) if iteration % 2 == 0 else 0))
        elif not low or iteration % 2:
            size = (low + high) // 2
        else:
            interpolated = low + (high - low) * (limit - low_peak) // max(1, high_peak - low_peak)
            size = min(max(interpolated, low + 1), high - 1)
    return low
