"""Token ids as English words, for endpoints that take text."""

from collections.abc import Sequence
from typing import Final

# Short and common: each is one token, with the space before it, in nearly every vocabulary.
_TEXT: Final = """
the of and to in is was for on that with as by at from it his he are this be which or had not
have were an their one all but first also they has her who been its two new more she when time
some other would after into there no may can only most over used up many about such out any than
these them where between through made while during known under well part both being will then
however since work another people three state before against until family world high later year
city same number use long group name life four place war school large second public early home
often show system game end found area small line music south north much set east west team land
great house side river town road play point book party death story order force film club law
field power king day night water light back man men woman child food form few local march season
major like main human best level late left right white black red green blue open free full hand
head body mind word voice letter page paper song art science space air fire ice sea sun moon
star tree stone metal gold iron wood glass wall door room floor table chair bed car train ship
plane bridge street park garden forest hill lake coast island rain snow wind storm summer winter
spring morning evening hour minute week month century age young old good bad true false hard
soft fast slow rich poor deep wide short tall heavy strong weak bright dark cold warm hot dry
wet clean safe sure clear simple common special single
"""
WORDS: Final = tuple(_TEXT.split())


def spell(token_ids: Sequence[int]) -> str:
    """A word for every token id: equal ids give equal texts, and a common start stays common."""
    count = len(WORDS)
    return " ".join(WORDS[token % count] for token in token_ids)
