//! Formats results: tables for the terminal, HTML pages with charts, JSON for machines.

pub mod agreement;
pub mod calibration;
pub mod html;
pub mod measurement;
pub mod models;
pub mod perplexity;
pub mod plan;
pub mod quality;
pub mod quantization;
pub mod simulation;
pub mod table;
pub mod tasks;
