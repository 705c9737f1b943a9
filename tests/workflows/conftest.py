import pytest

from cloister.mpc.net.receipts import Receipt


@pytest.fixture(autouse=True)
def _nothing_runs_undeclared(monkeypatch):
    """Every protocol that any run of these tests runs is declared for its mode and its options."""
    real = Receipt.add_reveals

    def strict(receipt, ran, declared):
        undeclared = [p for p in ran if p not in declared]
        assert not undeclared or not declared, f"{receipt.header['workflow']}: {undeclared} ran and are not declared"
        real(receipt, ran, declared)

    monkeypatch.setattr(Receipt, "add_reveals", strict)
