"""The 28 stations of the Madrid region's air quality network, and the names of what they measure.

Devices are the start of the path; a station holds the constant part of what one device publishes. The facts come from
the open data of the Comunidad de Madrid, Red de Calidad del Aire, licence CC BY 4.0 ("Fuente: Comunidad de Madrid, Red
de Calidad del Aire, CC BY 4.0"): the list of stations of 2025-09-30, and for what each measures the series published on
2026-05-13. Two misspelt names are corrected. Altitudes are as published, including Majadahonda's 360 m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

from tidegate.errors import BadInput

if TYPE_CHECKING:
    from tidegate.notification import Value

# The attribution that the licence requires for the facts and the data of the network.
ATTRIBUTION: Final = "Fuente: Comunidad de Madrid, Red de Calidad del Aire, CC BY 4.0"

Area: TypeAlias = Literal["urban", "suburban", "rural"]
Kind: TypeAlias = Literal["traffic", "background", "industrial"]

# The official number of each pollutant, and the attribute name that filters use.
MAGNITUDES: Final[dict[int, str]] = {
    1: "SO2",
    6: "CO",
    7: "NO",
    8: "NO2",
    9: "PM2.5",
    10: "PM10",
    12: "NOx",
    14: "O3",
    20: "toluene",
    30: "benzene",
    35: "ethylbenzene",
    42: "hydrocarbons",
    44: "nmhc",
    431: "xylene",
}

_ZONES: Final[dict[str, str]] = {
    "2": "Corredor del Henares",
    "3": "Urbana Sur",
    "4": "Urbana Noroeste",
    "5": "Sierra Norte",
    "6": "Cuenca del Alberche",
    "7": "Cuenca del Tajuña",
}

# code | name | zone | area | kind | longitude | latitude | altitude_m | magnitudes
_TABLE: Final = """
28005002|Alcalá de Henares          |2|urban   |traffic   |-3.3778|40.4792| 595|1 6 7 8 9 10 12 14
28006004|Alcobendas                 |2|urban   |traffic   |-3.6452|40.5405| 688|7 8 10 12 14 20 30 42 44 431
28007004|Alcorcón                   |3|urban   |background|-3.8337|40.3419| 693|7 8 9 12 14
28009001|Algete                     |2|suburban|background|-3.5033|40.5998| 800|7 8 9 12 14
28013002|Aranjuez                   |3|suburban|background|-3.5914|40.0333| 501|7 8 10 12 14
28014002|Arganda del Rey            |2|urban   |industrial|-3.4589|40.3008| 586|7 8 10 12 14
28016001|El Atazar                  |5|rural   |background|-3.4679|40.9091| 995|1 6 7 8 9 10 12 14 20 30 42 44 431
28045002|Colmenar Viejo             |4|urban   |traffic   |-3.7739|40.6646| 905|6 7 8 10 12 14
28047002|Collado Villalba           |4|urban   |traffic   |-4.0142|40.6331| 873|1 7 8 9 12 14 20 30 42 44 431
28049003|Coslada                    |2|urban   |traffic   |-3.5423|40.4305| 621|7 8 9 10 12 14
28058004|Fuenlabrada                |3|urban   |industrial|-3.8009|40.2815| 699|7 8 10 12 14 20 30 42 44 431
28065014|Getafe                     |3|urban   |traffic   |-3.7169|40.3146| 667|7 8 9 10 12 14
28067001|Guadalix de la Sierra      |5|rural   |background|-3.7022|40.7806| 853|7 8 10 12 14
28074007|Leganés                    |3|urban   |traffic   |-3.7545|40.3398| 676|7 8 9 10 12 14
28080003|Majadahonda                |4|suburban|background|-3.8690|40.4462| 360|7 8 10 12 14
28092005|Móstoles                   |3|suburban|background|-3.8767|40.3242| 660|1 6 7 8 10 12 14
28102001|Orusco de Tajuña           |7|rural   |background|-3.2211|40.2876| 800|1 6 7 8 10 12 14
28106001|Parla                      |3|suburban|traffic   |-3.7714|40.2459| 648|7 8 9 12 14
28115003|Pozuelo de Alarcón         |4|suburban|traffic   |-3.8080|40.4466| 690|7 8 9 12 14
28120001|Puerto de Cotos (Rascafría)|5|rural   |background|-3.9612|40.8251|1870|7 8 9 10 12 14
28123002|Rivas-Vaciamadrid          |2|suburban|background|-3.5429|40.3597| 608|7 8 10 12 14
28127004|Las Rozas                  |4|suburban|traffic   |-3.8856|40.5006| 718|7 8 10 12 14
28133002|San Martín de Valdeiglesias|6|rural   |background|-4.3981|40.3678| 549|7 8 10 12 14
28134002|San Sebastián de los Reyes |2|suburban|background|-3.6357|40.5697| 672|7 8 10 12 14
28148004|Torrejón de Ardoz          |2|suburban|background|-3.4776|40.4496| 597|7 8 9 10 12 14
28161001|Valdemoro                  |3|suburban|background|-3.6803|40.1852| 615|7 8 9 12 14
28171001|Villa del Prado            |6|rural   |background|-4.2757|40.2487| 510|1 6 7 8 9 10 12 14
28180001|Villarejo de Salvanés      |7|suburban|traffic   |-3.2767|40.1672| 764|7 8 9 12 14
"""


@dataclass(frozen=True, slots=True)
class Station:
    """Where a station stands and what it measures. Longitude and latitude are decimal degrees (ETRS89)."""

    code: str
    name: str
    zone: str
    area: Area
    kind: Kind
    longitude: float
    latitude: float
    altitude_m: int
    pollutants: tuple[str, ...]

    def attributes(self) -> dict[str, Value]:
        """Returns the attributes that every notification of this station repeats."""
        return {
            "station": self.code,
            "name": self.name,
            "zone": self.zone,
            "kind": self.kind,
            "area": self.area,
            "longitude": self.longitude,
            "latitude": self.latitude,
        }


def station(code: str) -> Station:
    """Returns the station with an eight-digit code. Raises BadInput D810 for a code outside the network."""
    found = _BY_CODE.get(code)
    if found is None:
        raise BadInput(
            "D810",
            f"no station has the code {code!r}",
            f"use the eight digits of a station, such as {STATIONS[0].code!r}",
        )
    return found


def _parse_line(line: str) -> Station:
    code, name, zone, area, kind, longitude, latitude, altitude_m, magnitudes = (
        cell.strip() for cell in line.split("|")
    )
    return Station(
        code,
        name,
        _ZONES[zone],
        cast(Area, area),
        cast(Kind, kind),
        float(longitude),
        float(latitude),
        int(altitude_m),
        tuple(MAGNITUDES[int(number)] for number in magnitudes.split()),
    )


STATIONS: Final[tuple[Station, ...]] = tuple(_parse_line(line) for line in _TABLE.strip().splitlines())
_BY_CODE: Final[dict[str, Station]] = {each.code: each for each in STATIONS}
