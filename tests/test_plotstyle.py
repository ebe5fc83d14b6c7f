"""Both styles of plots: contrast of their colours, also as colour-blind people see them."""

from itertools import combinations

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from prism.plots.base import COLOURS, GREY, OLIVE, STYLES, style

# Machado, Oliveira and Fernandes (2009), doi:10.1109/TVCG.2009.113: complete colour blindness
SEEN = {
    "all colours": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def linear(colour):
    c = np.array(to_rgb(colour))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """Contrast ratio of WCAG 2.2."""
    low, high = sorted(0.05 + linear(c) @ [0.2126, 0.7152, 0.0722] for c in (one, other))
    return high / low


def lab(colour, seen):
    """Oklab of Ottosson (2020), times 100."""
    to_lms = [[0.4122214708, 0.5363325363, 0.0514459929],
              [0.2119034982, 0.6806995451, 0.1073969566],
              [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    to_lab = [[0.2104542553, 0.7936177850, -0.0040720468],
              [1.9779984951, -2.4285922050, 0.4505937099],
              [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip
    return 100 * np.array(to_lab) @ np.cbrt(to_lms @ np.clip(np.array(seen) @ linear(colour), 0, 1))


def least_difference(colours):
    return min(
        float(np.linalg.norm(lab(one, seen) - lab(other, seen)))
        for seen in SEEN.values()
        for one, other in combinations(colours, 2)
    )


@pytest.mark.parametrize("name", STYLES)
def test_colours_stand_out_and_apart(name):
    with style(name):
        paper = matplotlib.rcParams["axes.facecolor"]
        paper = f"#{paper}" if not paper.startswith("#") else paper
        for colour in (*COLOURS, GREY, OLIVE):  # of graphics 3 : 1, of text 4.5 : 1
            assert contrast(colour, paper) >= (4.5 if colour == GREY else 3.0), colour
        for key in ("text.color", "xtick.labelcolor"):
            text = matplotlib.rcParams[key]
            assert contrast(text if text.startswith("#") else f"#{text}", paper) >= 7.0
        # six colours are at least nearly as far apart as those of Okabe and Ito
        assert least_difference(COLOURS) >= 0.9 * least_difference(OKABE_ITO)


def test_the_difference_can_be_too_small():
    assert least_difference(["#009E73", "#0A956D"]) < 0.9 * least_difference(OKABE_ITO)
