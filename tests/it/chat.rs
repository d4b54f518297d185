//! Conversations on a terminal: keys, screens, signals.
//!
//! Whole screens are compared with the files under tests/snapshots/chat. A change is accepted by
//! `IEC_UPDATE_SNAPSHOTS=1 cargo test --test it -- chat::`, which also draws the pictures of docs/guide/images again.

use crate::common::packed_with;
use crate::pty::Terminal;
use crate::signals::is_ignored;
use rustix::process::Signal;
use serde_json::json;
use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

const UPDATE: &str = "IEC_UPDATE_SNAPSHOTS";
/// Template with which the embedded model continues a story.
const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\
                        {% elif m.role == 'user' %}{{ m.content }}\n{% else %}{{ m.content }}\n{% endif %}{% endfor %}";

/// Returns a directory with a pack of the embedded model, whose context has `context` tokens.
fn home(context: usize) -> TempDir {
    let home = packed_with("stories260k", "config.json", json!({"max_position_embeddings": context}));
    std::fs::write(home.path().join("pack/chat_template.jinja"), TEMPLATE).unwrap();
    home
}

/// Returns `iec WORDS` in `home` with a seed, one thread and portable kernels, so that all machines show the same.
fn iec(home: &Path, words: &str) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("iec"));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("HOME", home).current_dir(home);
    command.envs([("IEC_DEVICE", "cpu"), ("IEC_ISA", "scalar"), ("LANG", "C.UTF-8")]);
    command.args(words.split_whitespace()).args(["--model-dir", "pack", "--threads", "1", "--seed", "7"]);
    command
}

/// Starts a conversation of greedy answers of at most 12 tokens and waits for the prompt.
fn chat(home: &Path, options: &str, rows: u16, columns: u16) -> Terminal {
    let words = format!("chat --greedy --max-new 12 {options}");
    let mut terminal = Terminal::start(iec(home, &words), rows, columns);
    terminal.wait_for_prompt();
    terminal
}

/// Types a line and waits for the next prompt.
#[track_caller]
fn enter(terminal: &mut Terminal, line: &str) {
    terminal.type_keys(line);
    let typed = format!("> {line}").replace(' ', "");
    terminal.wait("the typed line", |screen| screen.replace(['\n', ' '], "").ends_with(&typed));
    terminal.type_keys("\r");
    terminal.wait_for_prompt();
}

/// Compares the screen with the snapshot, or writes it.
#[track_caller]
fn assert_screen(terminal: &Terminal, name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots/chat").join(format!("{name}.txt"));
    let screen = terminal.screen() + "\n";
    if std::env::var_os(UPDATE).is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, screen).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(screen, expected, "found:\n{screen}\nexpected:\n{expected}");
}

/// Leaves with Ctrl-D.
#[track_caller]
fn leave(mut terminal: Terminal) {
    terminal.type_keys("\x04");
    assert_eq!(terminal.end(), Some(0), "{}", terminal.screen());
    assert!(terminal.is_restored());
}

#[test]
fn a_conversation_looks_as_documented_in_80_and_40_columns() {
    let home = home(512);
    for (name, rows, columns) in [("talk-80", 24, 80), ("talk-40", 30, 40)] {
        let mut terminal = chat(home.path(), "--no-history", rows, columns);
        enter(&mut terminal, "Once upon a time");
        enter(&mut terminal, "The dog saw a big ball");
        enter(&mut terminal, "/show context");
        enter(&mut terminal, "/hlep");
        assert_screen(&terminal, name);
        if columns == 80 {
            draw(&terminal, "chat");
        }
        leave(terminal);
    }
}

#[test]
fn answers_break_between_words() {
    let home = home(512);
    let mut terminal = Terminal::start(iec(home.path(), "chat --greedy --max-new 120 --no-history"), 60, 40);
    terminal.wait_for_prompt();
    enter(&mut terminal, "Once upon a time");
    let screen = terminal.screen();
    enter(&mut terminal, "/save talk.json");
    leave(terminal);
    let saved: serde_json::Value =
        serde_json::from_slice(&std::fs::read(home.path().join("talk.json")).unwrap()).unwrap();
    let answer = saved["messages"][1]["content"].as_str().unwrap();
    let words: Vec<&str> = answer.split_whitespace().collect();
    let shown: Vec<&str> = screen.split_whitespace().collect();
    assert!(words.len() > 40 && shown.windows(words.len()).any(|part| part == words), "{screen}\n{answer}");
}

#[test]
fn another_model_goes_on_with_the_conversation() {
    let (home, other) = (home(512), home(256));
    let other = other.path().join("pack").display().to_string();
    let mut terminal = chat(home.path(), "--no-history", 40, 100);
    enter(&mut terminal, "/system Be brief.");
    enter(&mut terminal, "/set max_new 3");
    enter(&mut terminal, "Once upon a time");
    for wrong in ["/load nope.json", "/load nowhere"] {
        enter(&mut terminal, wrong);
    }
    terminal.wait_for("name a file that /save wrote");
    terminal.wait_for("nowhere: found no file or directory of this name");
    terminal.type_keys(&format!("/load {other}\r"));
    terminal.wait_for("pack: fp32, context 256");
    terminal.wait_for_prompt();
    enter(&mut terminal, "/show history");
    terminal.wait("the messages", |screen| screen.contains("system: Be brief.") && screen.contains("user: Once upon"));
    enter(&mut terminal, "The dog");
    terminal.wait_for("cut at max_new, after 3 tokens");
    leave(terminal);
}

#[test]
fn a_message_can_be_written_in_an_editor() {
    let home = home(512);
    let script = home.path().join("editor.sh");
    std::fs::write(&script, "#!/bin/sh\nprintf '%s\\nsecond line\\n' \"$(cat \"$2\") ($1)\" > \"$2\"\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = iec(home.path(), "chat --greedy --max-new 3 --no-history");
    command.env("EDITOR", format!("{} --wait", script.display()));
    let mut terminal = Terminal::start(command, 24, 80);
    terminal.wait_for_prompt();
    enter(&mut terminal, "/edit Hello");
    enter(&mut terminal, "/show history");
    terminal.wait("the message", |screen| screen.contains("user: Hello (--wait)\nsecond line"));
    leave(terminal);
    let mut terminal = chat(home.path(), "--no-history", 24, 80);
    enter(&mut terminal, "/edit");
    terminal.wait_for("found neither VISUAL nor EDITOR");
    leave(terminal);
}

#[test]
fn help_lists_every_command() {
    let home = home(512);
    let mut terminal = chat(home.path(), "--no-history", 40, 100);
    enter(&mut terminal, "/help");
    assert_screen(&terminal, "help");
    leave(terminal);
}

#[test]
fn keys_edit_the_line_and_wide_characters_keep_their_place() {
    let home = home(512);
    let mut terminal = chat(home.path(), "--no-history", 24, 40);
    // Left arrow, insertion, Home, deletion of a word, End, a line longer than the screen.
    terminal.type_keys("/sysem 猫 says hi\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D");
    terminal.type_keys("t\x05 and this is a text of more than forty columns");
    terminal.wait_for("forty columns");
    assert_screen(&terminal, "edited-line");
    terminal.type_keys("\r");
    terminal.wait_for("system: 猫 says hi and this is a text");
    // Tab completes a command, and lists several.
    terminal.wait_for_prompt();
    terminal.type_keys("/he\t");
    terminal.wait_for("> /help");
    terminal.type_keys("\x15/s\t");
    terminal.wait("the list", |screen| screen.contains("/save") && screen.contains("/system"));
    terminal.type_keys("\x15");
    leave(terminal);
}

#[test]
fn several_lines_are_one_message() {
    let home = home(512);
    let mut terminal = chat(home.path(), "--no-history", 40, 80);
    // Text between marks.
    terminal.type_keys("\"\"\"first\r/help\rlast\"\"\"\r");
    terminal.wait_for("note: the answer");
    terminal.wait_for_prompt();
    // A backslash at the end of a line.
    terminal.type_keys("one\\\rtwo\r");
    terminal.wait("the second answer", |screen| screen.matches("note: the answer").count() == 2);
    terminal.wait_for_prompt();
    // A pasted text of three lines is sent by Enter, not by its line breaks.
    terminal.type_keys("\x1b[200~red\ngreen \\\nblue\x1b[201~");
    terminal.wait_for("blue");
    terminal.type_keys("\r");
    terminal.wait("the third answer", |screen| screen.matches("note: the answer").count() == 3);
    terminal.wait_for_prompt();
    terminal.type_keys("/save talk.json\r");
    terminal.wait_for("saved to talk.json");
    terminal.wait_for_prompt();
    let saved = std::fs::read(home.path().join("talk.json")).unwrap();
    let saved: serde_json::Value = serde_json::from_slice(&saved).unwrap();
    let messages = saved["messages"].as_array().unwrap();
    let texts: Vec<&str> = messages.iter().step_by(2).map(|message| message["content"].as_str().unwrap()).collect();
    assert_eq!(texts, ["first\n/help\nlast", "one\ntwo", "red\ngreen \\\nblue"]);
    leave(terminal);
}

#[test]
fn keys_typed_while_an_answer_is_generated_are_not_lost() {
    let home = home(512);
    let mut terminal = chat(home.path(), "--no-history", 24, 80);
    terminal.type_keys("one\rtwo\r/show history\r");
    terminal.wait("both messages", |screen| screen.contains("user: one") && screen.contains("user: two"));
    terminal.wait_for_prompt();
    leave(terminal);
}

#[test]
fn an_interrupt_stops_the_answer_and_the_conversation_goes_on() {
    // The context is so long that the answer does not end by itself.
    let home = home(1_000_000);
    let command = iec(home.path(), "run --chat --ignore-eos --greedy --no-history");
    let mut terminal = Terminal::start(command, 24, 80);
    terminal.wait_for_prompt();
    for _ in 0..2 {
        enter(&mut terminal, "/clear");
        let before = terminal.written.len();
        terminal.type_keys("Once upon a time\r");
        terminal.wait_until("an answer", |written| written.len() > before + 400);
        terminal.type_keys("\x03");
        let note = b"note: stopped; the answer so far stays in the conversation";
        terminal.wait_until("the note", |written| written[before..].windows(note.len()).any(|part| part == note));
        terminal.wait_for_prompt();
    }
    terminal.type_keys("/save talk.json\r");
    terminal.wait_for("saved to talk.json");
    let saved = std::fs::read_to_string(home.path().join("talk.json")).unwrap();
    assert!(saved.contains("\"finish_reason\": \"interrupted\"") && saved.len() > 400, "{saved}");
    terminal.wait_for_prompt();
    leave(terminal);
}

#[test]
fn two_interrupts_at_an_empty_prompt_leave() {
    let home = home(512);
    let mut terminal = chat(home.path(), "--no-history", 24, 80);
    terminal.type_keys("\x03");
    terminal.wait_for("to leave, press Ctrl-C once more or Ctrl-D, or type /exit");
    terminal.wait_for_prompt();
    // An interrupt of a typed line discards the line, and does not count.
    terminal.type_keys("a line");
    terminal.wait_for("> a line");
    terminal.type_keys("\x03");
    terminal.wait_for_prompt();
    terminal.type_keys("\x03");
    terminal.wait("the second note", |screen| screen.matches("once more").count() == 2);
    terminal.wait_for_prompt();
    terminal.type_keys("\x03");
    assert_eq!(terminal.end(), Some(0));
    assert!(terminal.is_restored());
}

#[test]
fn signals_at_the_prompt_end_the_program_and_restore_the_terminal() {
    let home = home(512);
    let signals = [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)];
    // A signal that the parent of the tests ignores (`nohup`) is ignored by the program, too.
    for (signal, code) in signals.into_iter().filter(|(signal, _)| !is_ignored(*signal)) {
        let mut terminal = chat(home.path(), "--no-history", 24, 80);
        terminal.type_keys("a line");
        terminal.wait_for("> a line");
        terminal.signal(signal);
        assert_eq!(terminal.end(), Some(code));
        assert!(terminal.is_restored(), "{signal:?}");
    }
}

#[test]
fn commands_change_the_history() {
    let home = home(512);
    let mut terminal = chat(home.path(), "--no-history", 50, 100);
    for line in [
        "/undo",
        "/regen",
        "/system Be brief.",
        "Once upon a time",
        "The cat",
        "/undo",
        "/save talk.json",
        "/regen",
        "/clear",
        "/save",
        "/load talk.json",
        "/show history",
        "/set temperature 0.5",
        "/set temprature 1",
        "/set seed x",
        "/show settings",
        "/adapter",
        "/adapter poems:0.5",
        "/save pack/model.ie.json",
        "/load nowhere.json",
    ] {
        enter(&mut terminal, line);
    }
    assert_screen(&terminal, "commands");
    enter(&mut terminal, "/exit now");
    terminal.type_keys("/bye\r");
    assert_eq!(terminal.end(), Some(0));
    let mode = std::fs::metadata(home.path().join("talk.json")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_full_context_leaves_out_the_oldest_turns_and_says_so() {
    let home = home(64);
    let mut terminal = chat(home.path(), "--no-history", 40, 100);
    enter(&mut terminal, "/system Tell a story.");
    for i in 0..4 {
        enter(&mut terminal, &format!("Number {i}: the cat and the dog"));
    }
    terminal.wait_for("the context of 64 tokens was full: the oldest");
    enter(&mut terminal, "/show history");
    assert_screen(&terminal, "full-context");
    // A message that does not fit is refused, and the conversation stays.
    let long = "word ".repeat(70);
    terminal.type_keys(&format!("{long}\r"));
    terminal.wait_for("expected at most 64 tokens of context");
    terminal.wait_for_prompt();
    enter(&mut terminal, "And then?");
    leave(terminal);
}

#[test]
fn typed_lines_are_kept_for_the_next_conversation() {
    let home = home(512);
    let mut terminal = chat(home.path(), "", 24, 80);
    enter(&mut terminal, "/show model");
    enter(&mut terminal, "/show context");
    leave(terminal);
    let file = home.path().join(".local/state/iec/history");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "/show model\n/show context\n");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let mut terminal = chat(home.path(), "", 24, 80);
    terminal.type_keys("\x1b[A\x1b[A");
    terminal.wait_for("> /show model");
    terminal.type_keys("\x15");
    leave(terminal);
    let mut terminal = chat(home.path(), "--no-history", 24, 80);
    enter(&mut terminal, "/help");
    leave(terminal);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "/show model\n/show context\n");
}

#[test]
fn a_resized_window_keeps_the_line() {
    let home = home(512);
    let mut terminal = chat(home.path(), "--no-history", 24, 80);
    let line = "a-line-that-is-longer-than-the-forty-columns-of-the-narrow-window";
    terminal.type_keys(line);
    terminal.wait_for(line);
    terminal.resize(24, 40);
    terminal.type_keys("!");
    terminal.wait("the line in two rows", |screen| screen.replace('\n', "").contains(&format!("{line}!")));
    terminal.type_keys("\x15");
    leave(terminal);
}

#[test]
fn control_characters_of_a_text_do_not_reach_the_terminal() {
    let home = home(512);
    let messages = [("user", "a\u{1b}]0;title\u{7}"), ("assistant", "\u{1b}[2Jb\u{9b}1m")];
    let talk: Vec<_> = messages.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
    std::fs::write(home.path().join("talk.json"), json!(talk).to_string()).unwrap();
    let mut terminal = chat(home.path(), "--no-history --load talk.json", 24, 80);
    terminal.type_keys("/show history\r");
    // The screen of the test leaves out U+FFFD, which is written for the other control characters.
    terminal.wait_for("assistant: ␛[2Jb1m");
    terminal.wait_for("user: a␛]0;title␇");
    let written = String::from_utf8_lossy(&terminal.written).into_owned();
    assert!(written.contains("b\u{fffd}1m"), "{written:?}");
    assert!(!written.contains("\x1b]0;") && !written.contains("\x1b[2J"), "{written:?}");
    terminal.wait_for_prompt();
    leave(terminal);
}

/// Draws the screen as a picture for the guide, when snapshots are written.
fn draw(terminal: &Terminal, name: &str) {
    if std::env::var_os(UPDATE).is_none() {
        return;
    }
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide/images");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join(format!("{name}.svg")), svg(terminal.cells(), terminal.screen().lines().count())).unwrap();
}

/// Returns the first rows of a screen as an SVG picture.
fn svg(screen: &vt100::Screen, rows: usize) -> String {
    let columns = screen.size().1.get();
    let (width, height) = (usize::from(columns) * 9 + 32, rows * 20 + 28);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"monospace\" \
         font-size=\"15\">\n<rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"#1e2228\"/>\n"
    );
    for row in 0..rows as u16 {
        for column in 0..columns {
            let Some(cell) = screen.cell(row, column).filter(|cell| cell.has_contents() && cell.contents() != " ")
            else {
                continue;
            };
            let text = cell.contents().replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;");
            let (x, y) = (16 + usize::from(column) * 9, 28 + usize::from(row) * 20);
            let weight = if cell.bold() { " font-weight=\"bold\"" } else { "" };
            let fill = match (cell.fgcolor(), cell.dim()) {
                (_, true) => "#8b949e",
                (vt100::Color::Idx(1 | 9), _) => "#ff7b72",
                (vt100::Color::Idx(6 | 14), _) => "#76e3ea",
                _ => "#e6edf3",
            };
            writeln!(out, "<text x=\"{x}\" y=\"{y}\" fill=\"{fill}\"{weight}>{text}</text>").unwrap();
        }
    }
    out + "</svg>\n"
}
