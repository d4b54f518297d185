//! How are results shown? Tables for the terminal, pages with charts for a browser.

pub mod html;
pub mod table;
