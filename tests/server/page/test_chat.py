"""Chat: turns, thinking, tools, files, keys and errors."""

import json

from playwright.sync_api import Browser

from tests.server.page.browsing import visiting
from tests.server.serving import Served

CHAT = {"mode": "chat", "maxTokens": 12}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": NOTHING}}]


def test_a_conversation_carries_its_history_and_its_settings(browser: Browser, served: Served) -> None:
    with visiting(browser, served, settings=CHAT) as visit:
        page = visit.open()
        page.click("#open-settings")
        page.fill("#temperature", "0.5")
        page.fill("#effort", "62")
        page.fill("#tools", json.dumps(WEATHER))
        page.click("#settings-form button[type=submit]")
        page.fill("#prompt", "Hello")
        page.press("#prompt", "Enter")
        visit.until_answered()
        page.fill("#prompt", "And\nthen?")
        page.press("#prompt", "Enter")
        visit.until_answered()
        first, second = visit.sent
        assert first["messages"] == [{"role": "user", "content": "Hello"}]
        assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
        assert second["messages"][2]["content"] == "And\nthen?"
        assert (first["temperature"], first["seed"], first["max_tokens"]) == (0.5, 7, 12)
        assert (first["reasoning_effort"], first["tools"], first["xray"]) == (62, WEATHER, True)
        folded = page.locator(".thinking").first
        assert folded.is_visible()
        assert folded.get_attribute("open") is None
        assert page.locator(".thought").first.is_hidden()
        folded.locator("summary").click()
        assert page.locator(".thought").first.is_visible()
        assert visit.trouble == []


def test_a_tool_is_called_and_the_person_answers_for_it(browser: Browser, served: Served) -> None:
    with visiting(browser, served, settings={**CHAT, "maxTokens": 300}) as visit:
        page = visit.open()
        page.click("#open-settings")
        page.fill("#tools", json.dumps(WEATHER))
        page.check("#must-call")
        page.click("#settings-form button[type=submit]")
        page.fill("#prompt", "Weather?")
        page.press("#prompt", "Enter")
        visit.until("document.querySelector('.tool-calls > button')?.checkVisibility()")
        assert page.locator(".tool-call code").first.text_content() == "weather"
        page.get_by_label("What the tool answers").fill("21 degrees")
        page.click(".tool-calls > button")
        visit.until_answered()
        page.fill("#prompt", "Never mind.")
        page.press("#prompt", "Enter")
        visit.until_answered()
        first, second, third = visit.sent
        assert first["tool_choice"] == "required"
        assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
        call = second["messages"][1]["tool_calls"][0]
        assert call["function"]["name"] == "weather"
        assert second["messages"][2] == {"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"}
        roles = [message["role"] for message in third["messages"]]
        assert roles == ["user", "assistant", "tool", "assistant", "tool", "user"], "a call passed over has a result"
        assert third["messages"][4]["content"] == ""
        assert page.locator(".turn .problem:visible").count() == 0
        assert visit.trouble == []


def test_tool_calls_are_shown_as_they_form_and_as_text(browser: Browser, served: Served) -> None:
    """No model writes hostile arguments on demand, so chunks are given to the page's own modules."""
    with visiting(browser, served, settings=CHAT) as visit:
        page = visit.open()
        sent = page.evaluate(
            """async () => {
              const { newAnswer, takeChunk, messageOf } = await import('/page/js/answer.js');
              const { ToolCalls } = await import('/page/js/tool_calls.js');
              const turn = { answer: newAnswer('chat') };
              let given = null;
              const calls = new ToolCalls(turn, (one) => { given = one.answer.toolCalls.map((call) => call.result); });
              document.getElementById('transcript').append(calls.root);
              const delta = (tool_calls) => takeChunk(turn.answer, { choices: [{ delta: { tool_calls } }] });
              delta([{ index: 0, id: 'call_1', function: { name: 'weather', arguments: '' } }]);
              delta([{ index: 0, function: { arguments: '{"city": "<b>Se' } }]);
              calls.update(false);
              const half = calls.root.querySelector('pre').textContent;
              delta([{ index: 0, function: { arguments: 'oul</b>"}' } }]);
              turn.answer.status = 'done';
              calls.update(true);
              const field = calls.root.querySelector('textarea');
              field.value = '21 degrees';
              field.dispatchEvent(new Event('input'));
              calls.root.querySelector('button').click();
              return { half, shown: calls.root.querySelector('pre').textContent, given, message: messageOf(turn.answer),
                       bold: calls.root.querySelectorAll('b').length };
            }"""
        )
        assert sent["half"] == '{"city": "<b>Se'
        assert json.loads(sent["shown"]) == {"city": "<b>Seoul</b>"}
        assert sent["bold"] == 0
        assert sent["given"] == ["21 degrees"]
        assert sent["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "<b>Seoul</b>"}'
        assert visit.trouble == []


def test_text_is_never_taken_for_markup(browser: Browser, served: Served) -> None:
    with visiting(browser, served, settings={"maxTokens": 4}) as visit:
        page = visit.open()
        hostile = '<img src=x onerror="document.title=1"><script>document.title=2</script>\n<b>bold</b>'
        visit.write(hostile)
        visit.until_answered()
        visit.until_xrayed()
        assert page.locator(".given").text_content() == hostile
        assert page.locator("img, .paper b, .source b, main script").count() == 0
        assert page.title() == "headrace"
        assert visit.trouble == []


def test_a_file_can_be_dropped_in_and_taken_out_again(browser: Browser, served: Served) -> None:
    with visiting(browser, served) as visit:
        page = visit.open()
        drop = """() => {
          const carried = new DataTransfer();
          carried.items.add(new File(['alpha = 1\\n'], 'notes.py', { type: 'text/plain' }));
          const drop = new DragEvent('drop', { dataTransfer: carried, bubbles: true });
          document.getElementById('talk').dispatchEvent(drop);
        }"""
        page.evaluate(drop)
        page.wait_for_selector(".file:has-text('notes.py'):has-text('tokens')")
        page.get_by_label("Remove notes.py").click()
        assert page.locator(".file").count() == 0
        page.evaluate(drop)
        page.wait_for_selector(".file")
        visit.write("beta = ")
        visit.until_answered()
        assert visit.sent[-1]["prompt"] == "alpha = 1\n\n\nbeta = "
        assert visit.trouble == []


def test_a_key_is_asked_for_where_the_server_wants_one(browser: Browser, served: Served) -> None:
    with visiting(browser, served, has_key=False) as visit:
        page = visit.open()
        page.wait_for_selector("#settings[open]")
        assert page.locator("#settings-problem").text_content() == "The server asks for an API key."
        page.fill("#api-key", "wrong")
        page.press("#api-key", "Enter")
        page.wait_for_selector("#settings-problem:has-text('did not accept this API key')")
        page.keyboard.press("Escape")
        visit.write("import ")
        page.wait_for_selector(".turn .problem:has-text('did not accept this API key')")
        page.click(".turn .problem button")
        page.fill("#api-key", served.api_key)
        page.press("#api-key", "Enter")
        page.wait_for_selector("#model:visible")
        assert page.locator("#model").text_content() == "headrace-nano"
        visit.write("import ")
        assert visit.until_answered()
        assert not page.evaluate("JSON.stringify(localStorage).includes('test-key')"), "a key outlives no tab"


def test_what_goes_wrong_is_said_in_words(browser: Browser, served: Served) -> None:
    with visiting(browser, served, settings={"temperature": 1.0}) as visit:
        page = visit.open()
        page.click("#open-settings")
        page.fill("#tools", "{")
        page.click("#settings-form button[type=submit]")
        assert page.locator("#settings-problem").text_content() == "Tools are not valid JSON."
        page.keyboard.press("Escape")
        page.context.set_offline(True)
        visit.write("import ")
        page.wait_for_selector(".turn .problem:visible")
        problem = page.locator(".turn .problem").text_content() or ""
        assert "cannot be reached" in problem
        assert "still running" in problem
        assert "fetch" not in problem, "what the browser calls it helps nobody"
        page.context.set_offline(False)
        page.locator(".turn-actions button").first.click()
        assert visit.until_answered()
        assert page.locator(".turn .problem").is_hidden()


def test_errors_are_told_apart_by_their_codes_and_written_as_sentences(browser: Browser, served: Served) -> None:
    with visiting(browser, served) as visit:
        page = visit.open()
        shown = page.evaluate(
            """async () => {
              const { ServerError, stream } = await import('/page/js/api.js');
              const kinds = [];
              const real = window.fetch;
              const told = [
                [503, 'stopping'], [503, 'engine_down'], [429, 'overloaded'], [403, 'x'], [401, 'x'], [500, 'x']];
              for (const [status, code] of told) {
                const body = JSON.stringify({ error: { message: 'it is so', code } });
                for (const answered of [new Response(body, { status }), new Response(`data: ${body}\n\n`)]) {
                  window.fetch = async () => answered;
                  try {
                    for await (const one of stream('/v1/completions', {})) void one;
                  } catch (problem) {
                    kinds.push(problem.kind);
                  }
                }
              }
              window.fetch = real;
              const { TurnView } = await import('/page/js/turn_view.js');
              const { newAnswer } = await import('/page/js/answer.js');
              const problem = new ServerError('restarting', 'the engine is so');
              const answer = { ...newAnswer('chat'), status: 'failed', problem };
              const view = new TurnView({ mode: 'chat', asked: null, answer }, { watchText() {} });
              view.update({ isLast: true, isBusy: false, facts: null, hasXray: false });
              return [kinds, [...view.problem.children].map((one) => one.textContent)];
            }"""
        )
        assert shown[0][0::2] == ["stopping", "restarting", "busy", "refused", "key", "broken"]
        assert shown[0][1:6:2] == ["stopping", "restarting", "busy"]
        assert shown[1] == ["The engine ended and is being started again.", "The engine is so."]
        assert visit.trouble == []
