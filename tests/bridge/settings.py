"""Objects that test modules read from another file: a number, a table, a class and an object of settings, helpers."""

SCALE = 2.0
TABLE = {"gain": 1.5}


class Hyper:
    shift = 0.5


class Fields:
    power = 1.0


fields = Fields()


def scaled(x):
    return x * SCALE


def shifted(x):
    return scaled(x) + 1
