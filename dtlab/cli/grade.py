def grade() -> None:
    """x"""
