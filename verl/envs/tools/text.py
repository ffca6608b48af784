"""Texts of unknown length and origin, made fit to be shown."""

NOTE_CHARS = 60  # more than the note in a shortened text ever has


def shortened(text: str, max_chars: int) -> str:
    """At most so many characters of a text, taken from its start and its end, in a form that can be encoded."""
    if len(text) > max_chars:
        half = (max_chars - NOTE_CHARS) // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return utf8(text)


def utf8(text: str) -> str:
    """The text without lone surrogates: JSON can spell them, but neither UTF-8 nor a tokenizer can take them."""
    return text.encode(errors="replace").decode()
