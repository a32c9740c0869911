"""The facts of the atlas world: cities and countries, as passages that a search can find.

Every fact is one link, (relation, entity) -> value, and one passage, "The currency of Belarus is Ruble.".
Data: GeoNames, CC BY 4.0.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"

CITY_RELATIONS = ("country", "time zone")
COUNTRY_RELATIONS = ("capital", "largest neighbour", "smallest neighbour", "currency", "internet domain", "continent")


@dataclass(frozen=True, slots=True)
class Fact:
    relation: str
    entity: str
    value: str

    @property
    def query(self) -> str:
        return f"{self.relation} of {self.entity}"

    @property
    def sentence(self) -> str:
        return f"The {self.query} is {self.value}."

    @property
    def passage(self) -> str:
        """Its document, as Search-R1 writes them: quoted title, newline, text."""
        return f'"{self.entity}"\n{self.sentence}'


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts, looked up by (relation, entity)."""

    cities: tuple[str, ...]
    """Most populous first."""
    countries: tuple[str, ...]
    by_query: dict[tuple[str, str], Fact]

    def find(self, relation: str, entity: str) -> Fact | None:
        return self.by_query.get((relation, entity))

    def passages(self) -> list[dict[str, str]]:
        """The corpus in Search-R1's schema."""
        return [{"id": str(number), "contents": fact.passage} for number, fact in enumerate(self.by_query.values())]


def _rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@cache
def load_facts() -> Facts:
    """From the shipped tables. Neighbours are by land area; a country with one neighbour has only a largest one."""
    country_rows, city_rows = _rows("countries.tsv"), _rows("cities.tsv")
    name_of = {row["code"]: row["name"] for row in country_rows}
    facts = []
    for row in city_rows:
        facts.append(Fact("country", row["name"], name_of[row["country"]]))
        facts.append(Fact("time zone", row["name"], row["time_zone"]))
    for row in country_rows:
        neighbours = [name_of[code] for code in row["neighbours"].split(",") if code]
        largest, smallest = neighbours[0] if neighbours else "", neighbours[-1] if len(neighbours) > 1 else ""
        values = (row["capital"], largest, smallest, row["currency"], row["domain"], row["continent"])
        found = zip(COUNTRY_RELATIONS, values, strict=True)
        facts.extend(Fact(relation, row["name"], value) for relation, value in found if value)
    return Facts(
        cities=tuple(row["name"] for row in city_rows),
        countries=tuple(name_of.values()),
        by_query={(fact.relation, fact.entity): fact for fact in facts},
    )
