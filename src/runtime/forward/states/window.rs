//! Inputs of a convolution at the last positions of a text.

/// Number of positions that can be taken back without a mark.
pub(super) const BACK: usize = 16;

/// Inputs of a convolution at the last positions of a text. A few more positions than the next one needs are kept, so
/// that rejected drafts can be taken back; the inputs at the last mark are kept, too.
#[derive(Debug, Clone)]
pub struct Window {
    /// Values per position.
    channels: usize,
    /// Earlier positions that the next one reads.
    reach: usize,
    /// Positions that were read.
    end: usize,
    /// Inputs at the last positions, `(positions, channels)`: as many as can be taken back, and as were not dropped
    /// yet.
    rows: Vec<f32>,
    /// Number of positions at the last mark, and the inputs that the next position needed.
    mark: (usize, Vec<f32>),
}

impl Window {
    /// Creates the window before the first position.
    pub(super) fn new(channels: usize, reach: usize) -> Window {
        Window { channels, reach, end: 0, rows: Vec::new(), mark: (0, Vec::new()) }
    }

    /// Returns the largest number of values that a window of these sizes holds, its mark included.
    pub(super) fn most_values(channels: usize, reach: usize) -> usize {
        channels * (2 * (reach + BACK) + reach)
    }

    /// Returns the number of positions that were read.
    pub(super) fn end(&self) -> usize {
        self.end
    }

    /// Returns the values per position and the earlier positions that the next one reads.
    pub(super) fn sizes(&self) -> [usize; 2] {
        [self.channels, self.reach]
    }

    /// Writes the inputs at the `reach` positions before the next one to `rows`, with zeros before the first position.
    pub fn read(&self, rows: &mut Vec<f32>) {
        let kept = &self.rows[self.rows.len().saturating_sub(self.reach * self.channels)..];
        rows.resize(rows.len() + self.reach * self.channels - kept.len(), 0.0);
        rows.extend_from_slice(kept);
    }

    /// Returns how many of the last of `positions` positions [`Window::push`] needs the inputs of.
    pub fn needed_of(&self, positions: usize) -> usize {
        positions.min(self.reach + BACK)
    }

    /// Adds the inputs of the next positions: `(positions, channels)`, or those of the last ones that are needed.
    pub fn push(&mut self, positions: usize, rows: &[f32]) {
        self.end += positions;
        let most = (self.reach + BACK) * self.channels;
        let rows = &rows[rows.len().saturating_sub(most)..];
        if rows.len() / self.channels < positions {
            self.rows.clear();
        }
        // Rows are dropped once their number has doubled, so that a position does not move all the others.
        if self.rows.len() + rows.len() > 2 * most {
            self.rows.drain(..(self.rows.len() + rows.len() - most).min(self.rows.len()));
        }
        self.rows.extend_from_slice(rows);
    }

    /// Returns the number of the first position whose input is kept.
    fn first(&self) -> usize {
        self.end - self.rows.len() / self.channels
    }

    /// Reports whether the inputs before position `len` are known.
    pub(super) fn reaches(&self, len: usize) -> bool {
        len <= self.end && self.first() <= len.saturating_sub(self.reach)
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.rows.truncate((len - self.first()) * self.channels);
        self.end = len;
        self.forget_later_mark();
    }

    /// Replaces the contents by the inputs before position `end`: those of [`Window::read`].
    pub(super) fn replace(&mut self, end: usize, rows: &[f32]) {
        let zeros = self.reach.saturating_sub(end) * self.channels;
        (self.end, self.rows) = (end, rows[zeros..].to_vec());
        self.mark = (0, Vec::new());
    }

    pub(super) fn mark(&mut self) {
        let kept = self.rows.len().saturating_sub(self.reach * self.channels);
        self.mark = (self.end, self.rows[kept..].to_vec());
    }

    /// Returns the number of positions at the last mark.
    pub(super) fn marked(&self) -> usize {
        self.mark.0
    }

    /// Goes back to the mark.
    pub(super) fn return_to_mark(&mut self) {
        (self.end, self.rows) = (self.mark.0, self.mark.1.clone());
    }

    /// Drops a mark beyond the end: the tokens that will be read there are others.
    fn forget_later_mark(&mut self) {
        if self.mark.0 > self.end {
            self.mark = (0, Vec::new());
        }
    }
}
