"""A zoo of tiny models with random weights, and the shapes at which they are tried."""
from models.case import Case
from models.language import LANGUAGE
from models.other import OTHER
from models.unseen import UNSEEN
from models.vision import VISION

ZOO: dict[str, Case] = {case.name: case for case in (*LANGUAGE, *VISION, *OTHER, *UNSEEN)}

__all__ = ["Case", "ZOO"]
