//! Texts that a known model writes arrive as they are, whole and streamed.

use super::known::{GO, KnownModel, serve};
use super::said::{Said, chat};
use serde_json::json;

#[test]
fn a_known_model_writes_its_texts_and_reacts_to_the_result_of_a_tool() {
    let home = tempfile::tempdir().unwrap();
    let template = format!(
        "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}<|im_start|>assistant\n{GO}"
    );
    let acting =
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<|g2|>' if messages[-1].role == 'tool' else '<|g1|>' }}";
    let texts =
        ["Hello! How are you? Hello! How is it?", "¦é¦\u{1f600}¦ü", "<b>one</b> two <b>one</b> three", "aaaaaaaaaaaa"];
    let model = texts.iter().fold(KnownModel::new(&template).plain(&["<b>", "</b>"]), |model, text| model.text(text));
    let models = [("texts", model), ("acting", KnownModel::new(acting).text("call").text("It is sunny."))];
    let server = serve(home.path(), &models, &[]);
    for (i, text) in texts.iter().enumerate() {
        let body = json!({"model": "texts", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100,
                          "chat_template_kwargs": KnownModel::go(i + 1)});
        assert_eq!(chat(&server, &body), Said::text(&text.replace('¦', "")), "{text}");
    }
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let mut messages = vec![json!({"role": "user", "content": "weather?"})];
    assert_eq!(chat(&server, &json!({"model": "acting", "messages": messages})), Said::text("call"));
    messages.push(json!({"role": "assistant", "content": "", "tool_calls": [call]}));
    messages.push(json!({"role": "tool", "content": "sun", "tool_call_id": "1"}));
    assert_eq!(chat(&server, &json!({"model": "acting", "messages": messages})), Said::text("It is sunny."));
}

#[test]
fn reasoning_text_and_a_call_of_a_known_model_arrive_in_their_fields() {
    let home = tempfile::tempdir().unwrap();
    let template = format!(
        "{{% if tools %}}{{{{ tools | tojson }}}}<tool_call>\n{{\"name\": f, \"arguments\": {{}}}}\n</tool_call>{{% endif %}}\
         {{% for m in messages %}}<|im_start|>{{{{ m.content }}}}{{% endfor %}}{GO}{{{{ '<think>\\n' }}}}"
    );
    let call = "hm</think>\n\nI ask.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let model = KnownModel::new(&template).special(&["<|other|>"]).plain(&["<think>", "</think>"]).opening("<think>\n");
    let model = model.plain(&["<tool_call>", "</tool_call>"]).config("model_max_length", json!(4096)).text(call);
    let server = serve(home.path(), &[("model", model)], &[]);
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "tools": [tool]});
    let expected = Said::calls(&[("f", "{\"a\": 1}")]).reasoning("hm").content("I ask.");
    assert_eq!(chat(&server, &body), expected);
}
