"""Cost tables as JSON files. Pure but for reading the file.

    {"format": 1, "source": "where the figures are from", "tokens": [[1, 0.0044], [16, 0.0045]],
     "context": [[1, 3.3e-8]], "level": [[1, 0.0002]], "proposal": 0.0}

Points are pairs of `CostTable`'s curves: (tokens of a step, seconds), (tokens of a row, seconds for
each token of context), (nodes of a drafter's level, seconds); proposal is in seconds.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.errors import ConfigError
from paceline.plan.cost import CostTable, Curve

FORMAT = 1
TABLES = Path(__file__).parent / "tables"

Points = tuple[tuple[float, float], ...]


class CostFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module's top."""

    format: int = FORMAT
    source: str = ""
    tokens: Points
    context: Points
    level: Points
    proposal: float

    @classmethod
    def of(cls, costs: CostTable, source: str = "") -> CostFile:
        return cls(
            source=source,
            tokens=_points(costs.tokens),
            context=_points(costs.context),
            level=_points(costs.level),
            proposal=costs.proposal,
        )

    @property
    def table(self) -> CostTable:
        """Raises ValueError for figures that cannot be times."""
        if self.format != FORMAT:
            raise ValueError(f"its format is {self.format}, this version reads {FORMAT}")
        points = (*self.tokens, *self.context, *self.level, (0.0, self.proposal))
        if not all(0 <= value < 1e12 for point in points for value in point):
            raise ValueError("a number in it is negative or no number")
        if not (self.tokens and self.context and self.level):
            raise ValueError("tokens, context and level need one point or more")
        if min(y for _, y in self.tokens) <= 0:
            raise ValueError("a step that takes no time")
        return CostTable(
            tokens=Curve.through(self.tokens),
            context=Curve.through(self.context),
            level=Curve.through(self.level),
            proposal=self.proposal,
        )


def _points(curve: Curve) -> Points:
    return tuple(zip(curve.x, curve.y, strict=True))


def read_costs(name: str) -> CostTable:
    """From a file, or from a table that comes along, by its name (`h200-llama-3.1-8b`)."""
    shipped = TABLES / f"{name}.json"
    path = shipped if shipped.is_file() else Path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostFile).table
    except FileNotFoundError:
        known = ", ".join(sorted(each.stem for each in TABLES.glob("*.json")))
        raise ConfigError(
            f"there is no cost table {name!r}: give a file, or one of {known}"
        ) from None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"the cost table {path} cannot be read: {error}") from None
