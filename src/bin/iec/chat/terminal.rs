//! Conversation on a terminal.

use super::editor::{Editor, UserInput};
use super::screen::AnswerView;
use super::talk::{Done, Question, Talk, goes_on, names_model};
use super::{Start, external};
use crate::global::Global;
use crate::{advice, console};
use iec::chat::command::{Command, Input, parse};
use iec::error::{Error, Result};
use iec::interrupt;

/// Step that follows an input of the user.
enum Next {
    /// The model answers.
    Ask(Question),
    /// The user is asked for the next input.
    Read,
    /// The conversation ends.
    Leave,
}

/// Holds the conversation until the user leaves.
///
/// # Errors
/// The terminal or the engine fails, or SIGTERM or SIGHUP arrives.
pub fn hold(start: &Start<'_>, talk: &mut Talk, editor: &mut Editor, global: &Global) -> Result<()> {
    let mut about_to_leave = false;
    loop {
        interrupt::take_interrupt();
        let entry = editor.read()?;
        if entry == UserInput::Interrupted(true) && about_to_leave {
            return Ok(());
        }
        about_to_leave = entry == UserInput::Interrupted(true);
        let input = match entry {
            UserInput::End => return Ok(()),
            UserInput::Interrupted(empty) => {
                if empty {
                    console::note("to leave, press Ctrl-C once more or Ctrl-D, or type /exit");
                }
                continue;
            }
            UserInput::Quoted(text) => Ok(Input::Message(text)),
            UserInput::Line(text) => parse(&text),
        };
        let next = match input {
            Ok(Input::Message(text)) if text.trim().is_empty() => Ok(Next::Read),
            Ok(Input::Message(text)) => Ok(Next::Ask(Question::Message(text))),
            Ok(Input::Command(command)) => follow(command, start, talk, editor, global),
            Err(e) => Err(e),
        };
        let done = match next {
            Ok(Next::Leave) => return Ok(()),
            Ok(Next::Read) => Ok(()),
            Ok(Next::Ask(question)) => answer(talk, question, global),
            Err(e) => Err(e),
        };
        done.or_else(|e| report(e, global))?;
    }
}

/// Follows a command.
fn follow(command: Command, start: &Start<'_>, talk: &mut Talk, editor: &mut Editor, global: &Global) -> Result<Next> {
    match command {
        Command::Load(model) if names_model(&model)? => match start.change_model(talk, &model, global) {
            Ok(()) => talk.greeting().iter().for_each(|line| global.note(line)),
            // The user can name another model, whatever was wrong with this one.
            Err(e) if !e.is_interrupt() => show(&e, global),
            Err(e) => return Err(e),
        },
        Command::Edit(text) => {
            let edited = external::edit(&text.unwrap_or_default());
            // A Ctrl-C was meant for the editor.
            interrupt::take_interrupt();
            let message = edited?;
            if !message.trim().is_empty() {
                editor.remember(&message)?;
                return Ok(Next::Ask(Question::Message(message)));
            }
            global.note("note: the text was empty; nothing was sent");
        }
        command => match talk.execute(command)? {
            Done::Exit => return Ok(Next::Leave),
            Done::Regenerate => return Ok(Next::Ask(Question::Again)),
            Done::Said(lines) => lines.iter().for_each(console::note),
        },
    }
    Ok(Next::Read)
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
    show(&error, global);
    Ok(())
}

/// Shows an error and what to do.
fn show(error: &Error, global: &Global) {
    let [red, cyan] = if global.colors() { [console::RED, console::CYAN] } else { [""; 2] };
    console::note_with_label(red, "error:", error.to_string());
    if let Some(help) = advice::of(error) {
        console::note_with_label(cyan, "help:", help);
    }
}
