"""From pasted text to records of the catalogue: `Matcher(catalog).find(text)`."""

from tamis.errors.matching.matcher import Findings, Match, Matcher

__all__ = ["Findings", "Match", "Matcher"]
