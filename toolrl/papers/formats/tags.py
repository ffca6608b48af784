"""One tool called in a pair of tags, its output in another pair: ReTool, Search-R1, OTC and ARTIST."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from verl.formats import jinja
from verl.formats.base import Calls, Continue, Final, Parsed, ParseError
from verl.formats.inline import InlineFormat
from verl.formats.prompt import load_template
from verl.formats.split import Split
from verl.types import Message, ToolCall, ToolSpec

ANSWER, ANSWER_END = "<answer>", "</answer>"
_FENCE, _FENCE_END = "```python", "```"


@dataclass(frozen=True)
class TagsFormat(InlineFormat):
    """The policy writes `<call>..</call>` and pauses at the closing tag; `<result>..</result>` is appended.

    call_tag, result_tag: tag names, without brackets
    before, inside, after: whitespace before the result's opening tag, next to its text, and after its closing tag
    fenced: the text of a call may be in a Markdown fence of Python, which is removed
    must_act: every turn needs a call or `<answer>..</answer>`, which is a stop string too; otherwise it is malformed,
        and the same text goes on after the error. The last turn stops at both tags: text after an action is ignored
    invalid: path of a text to show after a response without an action, such as the published one; default: our own
    """

    call_tag: str = "code"
    result_tag: str = "interpreter"
    before: str = "\n"
    inside: str = "\n"
    after: str = "\n"
    fenced: bool = False
    must_act: bool = False
    invalid: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._advice  # raises early if the file is invalid

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
        """Both closing tags if every turn is one action; else none, so that the response continues to its end, and none
        if a closing tag may be part of a thought."""
        return (self._closing, ANSWER_END) if self.must_act and self.calls_in_thoughts else ()

    @property
    def one_text(self) -> bool:
        return self.raw or self.must_act

    def read(self, written: str) -> Parsed:
        """The first complete call or answer in the text up to the first end of a call, else up to the first end of an
        answer. An end of an answer decides only if no later end of a call can change the action."""
        called, text = written.find(self._closing), written
        if called >= 0:
            text = written[: called + len(self._closing)]
        elif self.must_act and (answered := written.find(ANSWER_END)) >= 0:
            text = written[: answered + len(ANSWER_END)]
        call, answer = text.find(self._opening), text.find(ANSWER)
        answers = self.must_act and answer >= 0 and text.find(ANSWER_END, answer) >= 0
        if answers and not 0 <= call < answer:
            return Final()
        if called >= 0 and call >= 0:
            return self._call_in(text[call + len(self._opening) : called].strip())
        parsed = Final() if answers else self._without_action(text)
        return Continue(parsed) if called < 0 and self.paused(written) else parsed

    def _call_in(self, text: str) -> Parsed:
        if self.fenced and text.startswith(_FENCE):
            text = text.removeprefix(_FENCE).removesuffix(_FENCE_END).strip("\n")
        if not text.strip() and not self.must_act:
            return ParseError(f"There is nothing between {self._opening} and {self._closing}.")
        return Calls((self.call(text),))

    def _without_action(self, written: str) -> ParseError | Final:
        if self.must_act or self._closing in written:
            return ParseError(self._advice)
        if self._opening in written:
            return ParseError(f"{self._opening} is never closed with {self._closing}.")
        return Final()

    @cached_property
    def _advice(self) -> str:
        if self.invalid is not None:
            return load_template(self.invalid, "").text
        advice = f"That was no action. To use the tool, write {self._opening} .. {self._closing}"
        return f"{advice}; to answer, write {ANSWER} .. {ANSWER_END}." if self.must_act else f"{advice}."

    def delimiters(self, written: str) -> tuple[str, str]:
        return f"{self.before}<{self.result_tag}>{self.inside}", f"{self.inside}</{self.result_tag}>{self.after}"

    def render(self, calls: Sequence[ToolCall]) -> str:
        opening, closing = self._around_call
        return "\n".join(f"{opening}{call.arguments[self.argument]}{closing}" for call in calls)

    def calls_jinja(self) -> str:
        return jinja.each_call(jinja.argument(self.argument), *self._around_call)

    @property
    def _around_call(self) -> tuple[str, str]:
        before, after = (f"\n{_FENCE}\n", f"\n{_FENCE_END}\n") if self.fenced else (" ", " ")
        return f"{self._opening}{before}", f"{after}{self._closing}"


@dataclass(frozen=True)
class ReToolFormat(TagsFormat):
    """ReTool's inference code: `</code>` runs what follows the last opening fence, or all text since the last pause."""

    def read(self, written: str) -> Parsed:
        before, closing, _ = written.partition(self._closing)
        if not closing:
            return Final()
        code = before.rpartition(_FENCE)[2].replace(_FENCE_END, "").strip()
        return Calls((self.call(code),))

    def split(self, text: str, tools: Sequence[ToolSpec] = ()) -> Split:
        """The opening tag is no part of what is parsed."""
        parts = super().split(text, tools)
        return replace(parts, before=self._before_tag(parts.before)) if parts.calls else parts

    def certain_content(self, text: str) -> str:
        """Up to the first fence: without one, all of the text may turn out to be code."""
        before, fence, _ = self._until_pause(text).partition(_FENCE)
        return self._before_tag(before) if fence else ""

    def _before_tag(self, text: str) -> str:
        before, tag, rest = text.rpartition(self._opening)
        return before if tag and not rest.strip() else text

    def delimiters(self, written: str) -> tuple[str, str]:
        opening, closing = super().delimiters(written)
        return opening, closing.removeprefix(self.inside)


# arXiv 2504.11536; outputs as in its inference code: only the last line of errors
RETOOL = partial(
    ReToolFormat,
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
