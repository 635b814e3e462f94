"""How far apart two colours look, to various eyes. Used as the palette's oracle.

Sources: G. M. Machado, M. M. Oliveira, L. A. F. Fernandes 2009, table of matrices at severity 1.0
(dichromacy); G. Sharma, W. Wu, E. N. Dalal 2005, CIEDE2000, with its published test pairs.
"""

from __future__ import annotations

import numpy as np
from matplotlib.colors import to_rgb

EYES = {
    "usual": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}
_TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                    [0.0193339, 0.1191920, 0.9503041]])


def seen(color: str, eye: str) -> np.ndarray:
    """The colour in CIELAB (D65), as this eye sees it."""
    c = np.array(to_rgb(color))
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    xyz = _TO_XYZ @ np.clip(EYES[eye] @ linear, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """CIEDE2000 of two CIELAB colours; 1 is about what can just be noticed."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean_c = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 0.5 * (1 - np.sqrt(mean_c**7 / (mean_c**7 + 25.0**7)))
    a1, a2 = (1 + g) * a1, (1 + g) * a2
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    dh = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    big_h = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(dh / 2))
    mean_l, mean_c = (l1 + l2) / 2, (c1 + c2) / 2
    mean_h = h1 + h2 if c1 * c2 == 0 else (h1 + dh / 2) % 360
    t = (1 - 0.17 * np.cos(np.radians(mean_h - 30)) + 0.24 * np.cos(np.radians(2 * mean_h))
         + 0.32 * np.cos(np.radians(3 * mean_h + 6)) - 0.2 * np.cos(np.radians(4 * mean_h - 63)))
    turn = 60 * np.exp(-(((mean_h - 275) / 25) ** 2))
    rt = -np.sin(np.radians(turn)) * 2 * np.sqrt(mean_c**7 / (mean_c**7 + 25.0**7))
    sl = 1 + 0.015 * (mean_l - 50) ** 2 / np.sqrt(20 + (mean_l - 50) ** 2)
    terms = (l2 - l1) / sl, (c2 - c1) / (1 + 0.045 * mean_c), big_h / (1 + 0.015 * mean_c * t)
    return float(np.sqrt(sum(x * x for x in terms) + rt * terms[1] * terms[2]))


def least_difference(colors: list[str], eye: str) -> float:
    """The difference of the two colours that this eye tells apart worst."""
    labs = [seen(color, eye) for color in colors]
    return min(difference(x, y) for i, x in enumerate(labs) for y in labs[:i])
