"""Calibrations of made-up machines: factors and a third size lie in their intervals, more often.

``python experiments/verification/calibration.py [N [SEED]]`` makes N (40) repetitions of
``tests/test_calibration_recovery.py``, which makes 4: factors drawn from their priors, two sizes
measured, a third predicted. Deviations in units of the intervals have mean square 1 and lie within
the 90 % intervals, but for chance of 1e-4; four times as large or a tenth of it they would not.
It ends with status 1 where one does not.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from test_calibration_recovery import FIXED_S, RELATIVE, one_repetition, spread_holds


def main(n: int, seed: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        rows = [one_repetition(seed + k, Path(folder) / "made.nc") for k in range(n)]
    found = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    wrong = 0
    print("deviation              mean  mean square  within 90 %")
    for name in ("compute", "communication", "between_runs", "third", "third_p95"):
        z = found[name]
        holds = spread_holds(z) and not spread_holds(4.0 * z) and not spread_holds(0.1 * z)
        if name == "third_p95":  # no further off than the median may be
            holds = bool(np.mean(z**2) < 1.0 + 4.0 * (2.0 / n) ** 0.5)
        wrong += not holds
        inside = np.mean(np.abs(z) < 1.645)
        print(f"{name:20} {z.mean():7.2f} {np.mean(z**2):12.2f} {inside:12.1%}"
              + ("" if holds else "  WRONG"))  # fmt: skip
    for name, truth in (("relative", RELATIVE), ("fixed_s", FIXED_S)):
        ratio = float(np.mean(found[name])) / truth
        wrong += not abs(ratio - 1.0) < 0.05
        print(f"{name:20} {ratio:7.3f} of the truth")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*(int(x) for x in (*sys.argv[1:], *("40", "0")[len(sys.argv) - 1 :]))))
