//! Conversation on a terminal.

use super::editor::{Editor, Entry};
use super::screen::AnswerView;
use super::talk::{Done, Question, Talk, goes_on};
use crate::global::Global;
use crate::{advice, console};
use iec::error::{Error, Result};
use iec::interrupt;
use iec::session::chat::command::{Input, parse};

/// Holds the conversation until the user leaves.
///
/// # Errors
/// The terminal or the engine fails, or SIGTERM or SIGHUP arrives.
pub fn hold(talk: &mut Talk, editor: &mut Editor, global: &Global) -> Result<()> {
    let mut about_to_leave = false;
    loop {
        interrupt::take_interrupt();
        let entry = editor.read()?;
        if entry == Entry::Interrupted(true) && about_to_leave {
            return Ok(());
        }
        about_to_leave = entry == Entry::Interrupted(true);
        let input = match entry {
            Entry::End => return Ok(()),
            Entry::Interrupted(empty) => {
                if empty {
                    console::note("to leave, press Ctrl-C once more or Ctrl-D, or type /exit");
                }
                continue;
            }
            Entry::Quoted(text) => Ok(Input::Message(text)),
            Entry::Line(text) => parse(&text),
        };
        let question = match input {
            Ok(Input::Message(text)) if text.trim().is_empty() => continue,
            Ok(Input::Message(text)) => Question::Message(text),
            Ok(Input::Command(command)) => match talk.execute(command) {
                Ok(Done::Exit) => return Ok(()),
                Ok(Done::Regenerate) => Question::Again,
                Ok(Done::Said(lines)) => {
                    lines.iter().for_each(console::note);
                    continue;
                }
                Err(e) => {
                    report(e, global)?;
                    continue;
                }
            },
            Err(e) => {
                report(e, global)?;
                continue;
            }
        };
        if let Err(e) = answer(talk, question, global) {
            report(e, global)?;
        }
    }
}

/// Generates and shows an answer.
///
/// # Errors
/// The same as those of [`Talk::answer`].
pub fn answer(talk: &mut Talk, question: Question, global: &Global) -> Result<()> {
    let mut view = AnswerView::new(talk.settings.think, global.colors(), global.quiet);
    let reply = talk.answer(question, |part, text| view.show(part, text));
    if reply.is_ok() || view.has_begun() {
        view.finish()?;
    }
    let reply = reply?;
    talk.notes(&reply).iter().for_each(|note| global.note(format_args!("note: {note}")));
    if talk.settings.stats {
        talk.last.iter().for_each(console::note);
    }
    Ok(())
}

/// Shows an error after which the conversation goes on, and returns all others.
fn report(error: Error, global: &Global) -> Result<()> {
    // SIGINT also ends the child process that renders templates, whose failure arrives here as another error.
    if interrupt::take_interrupt() || error.is_sigint() {
        console::note("note: stopped");
        return Ok(());
    }
    if !goes_on(&error) {
        return Err(error);
    }
    let [red, cyan] = if global.colors() { [console::RED, console::CYAN] } else { [""; 2] };
    console::note_with_label(red, "error:", error.to_string());
    if let Some(help) = advice::of(&error) {
        console::note_with_label(cyan, "help:", help);
    }
    Ok(())
}
