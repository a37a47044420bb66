"""Amounts of memory, as every package writes them."""


def size(count_bytes: float) -> str:
    """Format an amount with three significant digits: ``512 bytes`` · ``1.36 GiB``."""
    power = next((power for power in range(4) if abs(count_bytes) < 1024 ** (power + 1)), 4)
    if power == 0:
        return f"{count_bytes:.0f} bytes"
    number = count_bytes / 1024**power
    digits = 2 if abs(number) < 10 else 1 if abs(number) < 100 else 0
    return f"{number:,.{digits}f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
