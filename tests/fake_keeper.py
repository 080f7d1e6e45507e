"""A keeper of a shared tier that has what a test puts there."""

from collections.abc import Callable

from opal_connector.transfers import SharedNews


class FakeKeeper:
    """News for whoever asks. Mutable state: what was not taken yet."""

    def __init__(self) -> None:
        self.news: list[SharedNews] = []
        self.on_unheard: Callable[[], None] | None = None

    @property
    def has_news(self) -> bool:
        return bool(self.news)

    def take_news(self) -> list[SharedNews]:
        taken, self.news = self.news, []
        return taken

    def generation(self) -> int:
        return 0
