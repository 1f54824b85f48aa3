"""From a request body to a prompt: the body as deepseek-recipe reads it, the prompt's ids, how to sample and parse."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import deepseek_recipe as recipe

from headrace.core.errors import CapacityError, UserError
from headrace.engine.sampling.params import SamplingParams
from headrace.server.protocol.constraint import Constraint, structured
from headrace.server.protocol.effort import DEFAULT, NAMES, Effort, write_effort
from headrace.server.protocol.history import History, splice, tail_of
from headrace.server.protocol.images import image_files
from headrace.server.protocol.markup import PRIVATE
from headrace.server.protocol.segments import ChatTokens, split
from headrace.server.protocol.store import ResponseStore

if TYPE_CHECKING:
    from headrace.models.deepseek_v41.architecture import Config
    from headrace.server.settings import ServerSettings
    from headrace.text.tokenizer import Tokenizer

Dialect = Literal["chat", "responses", "messages"]
Encoding = Literal["v4.1", "v4"]
_MODEL = "served"
_MAX_ANSWER = 393_216
_REQUESTS: dict[Dialect, Any] = {
    "chat": recipe.ChatCompletionRequest,
    "responses": recipe.ResponsesRequest,
    "messages": recipe.MessagesRequest,
}
_VERSIONS = {"v4.1": recipe.ModelVersion.DeepseekV41Flash, "v4": recipe.ModelVersion.DeepseekV4Pro}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A request, its fields checked by name.

    Attributes:
        dialect: whose body it is.
        body: what the encoding package reads.
        sampling: fields of `SamplingParams` that the request sets; temperature and top_p as it names them.
        effort: the effort it names, None if none; `effort_param` is the field's name.
        is_parallel: whether one answer may hold several tool calls.
        forced: where the package does not know the choice itself: a tool's name that must be called, or "" for any.
        schema: where the package does not read it itself: a JSON schema of the answer.
        is_continued: where the package does not know it itself: the last message is the beginning of the answer.
        cache_salt: cached prefixes are shared only between requests of the same salt.
    """

    dialect: Dialect
    body: dict[str, Any]
    sampling: dict[str, Any]
    effort: Effort | None = None
    effort_param: str = "reasoning_effort"
    is_parallel: bool = True
    forced: str | None = None
    schema: dict[str, Any] | None = None
    is_continued: bool = False
    cache_salt: str | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A prompt and everything that is to be known of its answer.

    Attributes:
        wanted: the request.
        prompt_ids: the prompt; an image is one token.
        images: the images' files, in the order of their places.
        conversation: what the prompt was rendered from.
        effort: the number in the prompt, None without thinking.
        params: how to sample; `max_tokens` is not final, see `resolved`.
        parsing: for the parser of each answer.
        generator: makes the writer of events, given the response's id and the model's name.
        tail: the prompt's ids that belong to the answer.
    """

    wanted: Wanted
    prompt_ids: list[int]
    images: list[bytes]
    conversation: recipe.Conversation
    effort: int | None
    params: SamplingParams
    parsing: Callable[[], recipe.ParsingOptions]
    generator: Callable[[str, str], Any]
    resolve: Callable[[int, int], int]
    tail: list[int]

    @property
    def is_thinking(self) -> bool:
        """Whether the conversation is one with reasoning."""
        return self.conversation.thinking_mode


class Protocol:
    """Owns what conversations of one model need.

    Attributes:
        history: tokens of past answers.
        responses: kept ones.
        running: those being generated, by their id.
    """

    def __init__(
        self,
        config: "Config",
        tokenizer: "Tokenizer | None",
        settings: "ServerSettings",
        encoding: Encoding = "v4.1",
    ) -> None:
        self._config, self._tokenizer, self._settings, self._encoding_name = config, tokenizer, settings, encoding
        self.history = History()
        self.responses = ResponseStore()
        self.running: dict[str, Any] = {}
        self._found: ChatTokens | None = None
        special = recipe.SpecialTokens()
        image = config.image_token_id
        if image is not None and tokenizer is not None:
            spelled = tokenizer.id_to_token(image)
            special = recipe.SpecialTokens(image=spelled) if spelled else special
        options = recipe.ConversionOptions(responses_web_search=recipe.WebSearchBehavior.Reject)
        self._options = options.with_special_tokens(special).with_model_alias(_MODEL, _VERSIONS[encoding])
        kinds: dict[str, Any] = {"v4.1": recipe.DeepseekV41Encoding, "v4": recipe.DeepseekV4Encoding}
        self._encoding = kinds[encoding]().with_special_tokens(special)

    @property
    def tokens(self) -> ChatTokens:
        """The model's special tokens.

        Raises:
            UserError: it has none, so it takes no conversations.
        """
        if self._found is None:
            if self._tokenizer is None:
                raise UserError("this model has no tokenizer, so it takes no conversations; accepted are token ids")
            self._found = ChatTokens(self._tokenizer)
        return self._found

    def read(self, wanted: Wanted) -> Turn:
        """Return the prompt of a request; may take a while for a long one.

        Raises:
            UserError: something in it is refused.
        """
        tokens = self.tokens
        request = self._converted(wanted)
        conversation = _conversation(request.conversation, wanted)
        images = image_files(
            [source for message in conversation.messages for source in message.image_sources],
            self._settings,
            has_vision=self._config.vision is not None,
        )
        segments = split(self._encoding.render_conversation(conversation))
        is_thinking, effort = conversation.thinking_mode, wanted.effort
        if is_thinking and effort is not None and effort.is_custom:
            segments = write_effort(segments, effort.number or 0, wanted.effort_param)
        ids = splice(segments, conversation.messages, wanted.cache_salt, self.history, tokens)
        return Turn(
            wanted=wanted,
            prompt_ids=ids,
            images=images,
            conversation=conversation,
            effort=_number(effort, is_thinking, self._encoding_name),
            params=self._params(request, conversation, wanted),
            parsing=lambda: _parsing(request.parsing_options, conversation),
            generator=lambda response_id, model: _generator(request, conversation, wanted, response_id, model),
            resolve=lambda prompt, context: _max_tokens(request, prompt, context),
            tail=tail_of(ids, tokens),
        )

    def _converted(self, wanted: Wanted) -> recipe.ConversationRequest:
        body = {**wanted.body, "model": _MODEL}
        try:
            return _REQUESTS[wanted.dialect](body).convert(self._options)
        except recipe.ConversionError as error:
            raise _refusal(error) from error
        except UnicodeEncodeError:
            raise UserError("the body holds half of a surrogate pair, which is not Unicode text") from None
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise UserError(str(error)[:300]) from error

    def _params(
        self, request: recipe.ConversationRequest, conversation: recipe.Conversation, wanted: Wanted
    ) -> SamplingParams:
        options, sampling = request.inference_options, dict(wanted.sampling)
        temperature, top_p = sampling.pop("temperature", None), sampling.pop("top_p", None)
        is_thinking = conversation.thinking_mode
        if is_thinking:  # the package's rule: whatever the request says
            temperature = options.temperature
            top_p = round(options.top_p or 1.0, 6)
        return SamplingParams(
            temperature=self._settings.default_temperature if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            cache_salt=wanted.cache_salt,
            structured=structured(
                _constraint(request, conversation, wanted),
                encoding=self._encoding_name,
                is_thinking=_starts_in_reasoning(request, conversation),
                is_parallel=wanted.is_parallel,
            ),
            **sampling,
        )


def _conversation(found: recipe.Conversation, wanted: Wanted) -> recipe.Conversation:
    """Return the conversation with what the package's Messages conversion leaves out."""
    if wanted.forced is None and wanted.schema is None and not wanted.is_continued:
        return found
    messages, tools = list(found.messages), found.tools
    if wanted.forced is not None and found.thinking_mode:
        raise UserError("thinking does not go together with a tool_choice that forces a call", param="tool_choice")
    if wanted.forced:
        tools = [tool for tool in tools if tool.name == wanted.forced]
    if wanted.forced is not None and not tools:
        raise UserError(f"tool_choice names {wanted.forced!r}, which is not among the tools", param="tool_choice")
    last = messages[-1] if messages else None
    if wanted.is_continued and last is not None:
        if last.role != "assistant" or last.tool_calls:
            raise UserError("the last message is not an answer that can be continued", param="messages")
        reasoning = last.reasoning_content if found.thinking_mode else None
        messages[-1] = recipe.AssistantMessage(last.content, reasoning, None, prefix=True)
    return recipe.Conversation(
        messages,
        thinking_mode=found.thinking_mode,
        tools=tools,
        tool_choice=found.tool_choice if wanted.forced is None else "required",
        reasoning_effort=found.reasoning_effort,
        response_format="json_object" if found.response_format == "json_object" else "text",
        response_schema=found.response_schema if wanted.schema is None else wanted.schema,
        response_regex=found.response_regex,
    )


def _constraint(
    request: recipe.ConversationRequest, conversation: recipe.Conversation, wanted: Wanted
) -> Constraint | None:
    if wanted.schema is not None:
        return Constraint("json", json.dumps(wanted.schema))
    found = request.inference_options.output_constraint
    if found is None:
        return None
    if wanted.forced is None:
        return Constraint(found.kind, found.schema)
    names = {tool.name for tool in conversation.tools}
    tools = [tool for tool in json.loads(found.schema) if tool["function"]["name"] in names]
    return Constraint("tool_call_required", json.dumps(tools))


def _parsing(options: recipe.ParsingOptions, conversation: recipe.Conversation) -> recipe.ParsingOptions:
    return recipe.ParsingOptions(
        parse_tool_calls=options.parse_tool_calls,
        starts_in_tool_calls=conversation.tool_choice == "required" and bool(conversation.tools),
        thinking_initial_stage=_stage(options, conversation),
        special_tokens=recipe.SpecialTokens(dsml=PRIVATE),
    )


def _stage(options: recipe.ParsingOptions, conversation: recipe.Conversation) -> recipe.ThinkingInitialStage | None:
    last = conversation.messages[-1] if conversation.messages else None
    if options.thinking_initial_stage is None or last is None or not last.prefix:
        return options.thinking_initial_stage
    if last.content:
        return recipe.ThinkingInitialStage.ContentContinuation
    return options.thinking_initial_stage


def _starts_in_reasoning(request: recipe.ConversationRequest, conversation: recipe.Conversation) -> bool:
    stage = _stage(request.parsing_options, conversation)
    return stage is not None and stage.starts_in_reasoning()


def _generator(
    request: recipe.ConversationRequest,
    conversation: recipe.Conversation,
    wanted: Wanted,
    response_id: str,
    model: str,
) -> Any:
    if wanted.dialect == "messages":
        return recipe.MessagesChunkGenerator(response_id, model, conversation.thinking_mode)
    generator = _REQUESTS[wanted.dialect].chunk_generator(request, response_id, model)
    if wanted.dialect == "responses":
        return generator.with_echo(recipe.ResponsesRequest({**wanted.body, "model": model}).echo())
    return generator


def _max_tokens(request: recipe.ConversationRequest, prompt_tokens: int, context: int) -> int:
    if prompt_tokens >= context:
        raise CapacityError(
            f"the conversation has {prompt_tokens} tokens; the model's context, answer included, is {context} tokens",
            param="messages",
        )
    try:
        return request.resolve_max_tokens(prompt_tokens, context)
    except recipe.ConversionError:
        return context - prompt_tokens  # more was asked for than the context holds


def _number(effort: Effort | None, is_thinking: bool, encoding: str) -> int | None:
    if not is_thinking or encoding == "v4":
        return None
    return NAMES[DEFAULT] if effort is None else effort.number


def _refusal(error: recipe.ConversionError) -> UserError:
    try:
        told = json.loads(error.body)["error"]
        return UserError(str(told["message"]), param=told.get("param"))
    except (ValueError, KeyError, TypeError):
        return UserError("the request cannot be read as a conversation")
