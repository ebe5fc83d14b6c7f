"""Carbon intensity of grids: a year's mean by country, life cycle, by ISO 3166-1 alpha-3 code.

Ember, Yearly Electricity Data (CC BY 4.0), as of 2024. Within a country grids differ as much as
countries do, and a contract may say something else: `run.grid_intensity` is then to be given.
"""

REGIONS: dict[str, tuple[float, int]] = {
    "ARE": (561, 2022), "AUS": (570, 2022), "AUT": (111, 2023), "BEL": (138, 2023),
    "BRA": (106, 2022), "CAN": (161, 2022), "CHE": (35, 2023), "CHL": (354, 2022),
    "CHN": (586, 2022), "CZE": (450, 2023), "DEU": (381, 2023), "DNK": (152, 2023),
    "ESP": (174, 2023), "FIN": (79, 2023), "FRA": (56, 2023), "GBR": (238, 2023),
    "HKG": (700, 2022), "IDN": (676, 2022), "IND": (705, 2022), "IRL": (291, 2023),
    "ISL": (28, 2022), "ISR": (583, 2022), "ITA": (331, 2023), "JPN": (513, 2022),
    "KOR": (442, 2022), "MEX": (475, 2022), "MYS": (606, 2022), "NLD": (268, 2023),
    "NOR": (30, 2023), "NZL": (111, 2022), "POL": (662, 2023), "PRT": (166, 2023),
    "QAT": (603, 2022), "SAU": (707, 2022), "SGP": (474, 2022), "SWE": (41, 2023),
    "THA": (561, 2022), "TWN": (640, 2022), "USA": (386, 2022), "VNM": (410, 2022),
    "WORLD": (486, 2022), "ZAF": (730, 2022),
}  # fmt: skip
"""g CO2e/kWh, and of which year."""
