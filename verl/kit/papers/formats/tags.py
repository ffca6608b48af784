"""One tool called in a pair of tags, its output in another pair: presets for ReTool, Search-R1, OTC and ARTIST."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from verl.formats import jinja
from verl.formats.base import Calls, Continue, Final, Parsed, ParseError
from verl.formats.inline import InlineFormat
from verl.formats.text import find_spoken, speech_start
from verl.types import Message, ToolCall, ToolSpec

ANSWER, ANSWER_END = "<answer>", "</answer>"
_FENCE, _FENCE_END = "```python", "```"


@dataclass(frozen=True)
class TagsFormat(InlineFormat):
    """The policy writes `<call>..</call>` and pauses at the closing tag; `<result>..</result>` is appended.

    call_tag, result_tag: tag names, without brackets
    before, inside, after: whitespace before the result's opening tag, next to its text, and after its closing tag
    fenced: the text of a call may be in a Markdown fence of Python, which is removed
    must_act: every turn needs a call or `<answer>..</answer>`, which is a stop string too; otherwise it is malformed.
        The last turn stops at both tags, as in Search-R1's published code: text after the first action is ignored
    """

    call_tag: str = "code"
    result_tag: str = "interpreter"
    before: str = "\n"
    inside: str = "\n"
    after: str = "\n"
    fenced: bool = False
    must_act: bool = False

    @property
    def _opening(self) -> str:
        return f"<{self.call_tag}>"

    @property
    def _closing(self) -> str:
        return f"</{self.call_tag}>"

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | Sequence[Message]:
        """See InlineFormat. A question that already explains calls and answers, as in Search-R1's published rows, is
        kept as it is; it is recognized by both tags of a call and both of an answer."""
        question = messages[-1].content
        if all(tag in question for tag in self.instruction_tags):
            return question if self.raw else tuple(messages)
        return super().render_prompt(messages, tools)

    @property
    def instruction_tags(self) -> tuple[str, ...]:
        return self._opening, self._closing, ANSWER, ANSWER_END

    def stop_strings(self, written: str) -> tuple[str, ...]:
        return (self._closing, ANSWER_END) if self.must_act else (self._closing,)

    @property
    def final_stop_strings(self) -> tuple[str, ...]:
        """Both closing tags if every turn is one action; else none, so that the response continues to its end."""
        return (self._closing, ANSWER_END) if self.must_act else ()

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """The first call outside thoughts; a pause inside a thought is not a call."""
        beginning = speech_start(written)
        start = find_spoken(written, self._opening, beginning)
        if start >= 0:
            return self._read(written, start + len(self._opening))
        if self.must_act:
            answer = find_spoken(written, ANSWER, beginning)
            if answer >= 0 and written.find(ANSWER_END, answer) >= 0:
                return Final()
        if self.paused(written):
            if not any(find_spoken(written, tag, beginning) >= 0 for tag in self.stop_strings(written)):
                return Continue()
            return ParseError(self._advice())
        return ParseError(self._advice()) if self.must_act else Final()

    def _read(self, written: str, start: int) -> Parsed:
        end = written.find(self._closing, start)
        if end < 0:
            return ParseError(f"{self._opening} is never closed with {self._closing}.")
        text = written[start:end].strip()
        if self.fenced and text.startswith(_FENCE):
            text = text.removeprefix(_FENCE).removesuffix(_FENCE_END).strip("\n")
        if not text.strip():
            return ParseError(f"There is nothing between {self._opening} and {self._closing}.")
        return Calls((self.call(text),))

    def _advice(self) -> str:
        advice = f"That was no action. To use the tool, write {self._opening} .. {self._closing}"
        return f"{advice}; to answer, write {ANSWER} .. {ANSWER_END}." if self.must_act else f"{advice}."

    def wrap(self, output: str, written: str) -> str:
        text = f"{self.inside}{output}{self.inside}"
        return f"{self.before}<{self.result_tag}>{text}</{self.result_tag}>{self.after}"

    def render(self, calls: Sequence[ToolCall]) -> str:
        opening, closing = self._around_call
        return "\n".join(f"{opening}{call.arguments[self.argument]}{closing}" for call in calls)

    def calls_jinja(self) -> str:
        return jinja.each_call(jinja.argument(self.argument), *self._around_call)

    @property
    def _around_call(self) -> tuple[str, str]:
        before, after = (f"\n{_FENCE}\n", f"\n{_FENCE_END}\n") if self.fenced else (" ", " ")
        return f"{self._opening}{before}", f"{after}{self._closing}"


# arXiv 2504.11536; outputs as in its inference code: only the last line of errors
RETOOL = partial(
    TagsFormat,
    prompt_template="retool",
    call_tag="code",
    result_tag="interpreter",
    last_line_of_errors=True,
    empty="None",
    after="\n\n",
    fenced=True,
)
# arXiv 2503.09516
SEARCH_R1 = partial(
    TagsFormat,
    prompt_template="search_r1",
    tool="search",
    argument="query",
    call_tag="search",
    result_tag="information",
    before="\n\n",
    inside="",
    after="\n\n",
    must_act=True,
)
# arXiv 2504.14870: Search-R1 with another tag and another prompt
OTC_SEARCH = partial(SEARCH_R1, prompt_template="otc_search", result_tag="observation")
# arXiv 2505.01441, mathematics
ARTIST = partial(
    TagsFormat, prompt_template="artist_math", call_tag="python", result_tag="output", fenced=True, empty="(no output)"
)
