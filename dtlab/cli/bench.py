import typer
app = typer.Typer(help="x")
@app.command()
def launch() -> None:
    """x"""
@app.command()
def collectives() -> None:
    """x"""
