"""What bounded a query of predict-cellcnn before N7: its number of donors, checked by the querier itself."""

from cloister.errors import DataError

MAX_DONORS = 64  # the default of one run


def check_at_querier(donors, max_donors=MAX_DONORS):
    if donors > max_donors:
        raise DataError("more donors than max_donors")


def check_at_holder(donors):
    """Nothing: a holder answered every place of a ciphertext, in as many runs as there were openings."""
