//! One screen from one look: pure drawing.

use orbitkv_manager::units::rounded;
use orbitkv_shm_protocol::inspect::{DeviceView, LifeState, Snapshot};
use orbitkv_shm_protocol::telemetry::SsdRecovery;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, LineGauge, Paragraph, Row, Table};

use super::rates::{Rates, hit_ratio};

/// Below so many columns, texts are short and tables lose columns.
const WIDE: u16 = 72;
/// Below so many rows, SSD devices share one line and budgets are left out.
const TALL: u16 = 16;
/// SSD devices that have a row of their own at most.
const DEVICE_ROWS_MAX: usize = 4;

/// What is drawn.
pub(super) struct Screen<'a> {
    /// What was seen last.
    pub(super) snapshot: &'a Snapshot,
    /// How fast it changes, where that is known.
    pub(super) rates: Option<&'a Rates>,
    /// Why there is nothing newer.
    pub(super) absent: Option<String>,
}

/// Draws everything that fits, the most important on top.
pub(super) fn draw(frame: &mut Frame<'_>, screen: &Screen<'_>) {
    let area = frame.area();
    let (wide, tall) = (area.width >= WIDE, area.height >= TALL);
    let snapshot = screen.snapshot;
    let device_rows = match snapshot.ssd.len() {
        0 => 0,
        devices if tall => devices.min(DEVICE_ROWS_MAX) as u16 + 1,
        _ => 1,
    };
    let bars = if tall { 3 } else { 1 };
    let rows = [
        Constraint::Length(2),
        Constraint::Length(bars),
        Constraint::Length(2),
        Constraint::Length(device_rows),
        Constraint::Min(0),
    ];
    let [head, bars, rates, ssd, sessions] = Layout::vertical(rows).areas(area);
    frame.render_widget(Paragraph::new(head_lines(screen, wide)), head);
    draw_bars(frame, bars, snapshot, wide);
    frame.render_widget(Paragraph::new(rate_lines(screen, wide)), rates);
    draw_ssd(frame, ssd, snapshot, wide, tall);
    draw_sessions(frame, sessions, snapshot, wide);
}

fn state_style(state: LifeState) -> Style {
    let color = match state {
        LifeState::Ready => Color::Green,
        LifeState::Starting | LifeState::Degraded | LifeState::Draining => Color::Yellow,
        LifeState::Unresponsive | LifeState::Dead => Color::Red,
    };
    Style::new().fg(color).add_modifier(Modifier::BOLD)
}

fn head_lines(screen: &Screen<'_>, wide: bool) -> Vec<Line<'static>> {
    let m = &screen.snapshot.manager;
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut first = vec![Span::styled("orbitkv ", bold)];
    match &screen.absent {
        Some(_) => first.push(Span::styled("gone", state_style(LifeState::Dead))),
        None => first.push(Span::styled(m.state.label(), state_style(m.state))),
    }
    first.push(Span::raw(format!(" pid {} up {}", m.pid, span_text(m.uptime_seconds))));
    if let Some(rates) = screen.rates {
        first.push(Span::raw(format!(" cpu {:.0}%", rates.cores * 100.0)));
    }
    if wide {
        first.push(Span::raw(format!(" version {}, q quits", m.version)));
    }
    let second = match (&screen.absent, m.problems.first()) {
        (Some(absent), _) => format!("waiting for a Manager: {absent}"),
        (None, Some(problem)) => problem.clone(),
        (None, None) if matches!(m.state, LifeState::Dead | LifeState::Unresponsive) => {
            format!("last numbers, {} old", span_text(m.heartbeat_age_ms as f64 / 1e3))
        }
        (None, None) => m.socket.clone(),
    };
    vec![Line::from(first), Line::from(second)]
}

/// `1d02h`, `3h04m`, `5m06s` or `7s`.
fn span_text(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (1.., ..) => format!("{days}d{:02}h", hours % 24),
        (_, 1.., _) => format!("{hours}h{:02}m", minutes % 60),
        (_, _, 1..) => format!("{minutes}m{:02}s", seconds % 60),
        _ => format!("{seconds}s"),
    }
}

fn draw_bars(frame: &mut Frame<'_>, area: Rect, snapshot: &Snapshot, wide: bool) {
    let (pool, budget) = (&snapshot.pool, &snapshot.budget);
    let pinned =
        if wide { format!(", {} pinned", rounded(pool.pinned_bytes)) } else { String::new() };
    let bars = [
        ("dram", pool.used_bytes, pool.capacity_bytes, pinned),
        ("leases", budget.total_bytes, budget.limits.total_bytes, String::new()),
        ("hints", budget.speculative_bytes, budget.limits.speculative_bytes, String::new()),
    ];
    let rows = area.rows();
    for (row, (name, used, limit, more)) in rows.zip(bars) {
        let label = format!("{name:<6} {} of {}{more}", rounded(used), rounded(limit));
        let gauge = LineGauge::default()
            .ratio(ratio(used, limit))
            .label(format!("{label:<width$}", width = if wide { 44 } else { 24 }))
            .filled_symbol("█")
            .unfilled_symbol("░")
            .filled_style(Style::new().fg(Color::Cyan));
        frame.render_widget(gauge, row);
    }
}

/// Between zero and one, whatever the numbers are.
fn ratio(used: u64, limit: u64) -> f64 {
    if limit == 0 { 0.0 } else { (used as f64 / limit as f64).clamp(0.0, 1.0) }
}

fn rate_lines(screen: &Screen<'_>, wide: bool) -> Vec<Line<'static>> {
    let percent = |ratio: Option<f64>| match ratio {
        Some(ratio) => format!("{:.0}%", ratio * 100.0),
        None => "-".to_owned(),
    };
    let ever = percent(hit_ratio(&screen.snapshot.counters));
    let Some(rates) = screen.rates else {
        return vec![
            Line::from("no rates yet"),
            Line::from(format!("hits {ever} since the start")),
        ];
    };
    let bytes = |rate: f64| format!("{}/s", rounded(rate as u64));
    let recent = percent(rates.hit_ratio);
    let (saved, restored) = (bytes(rates.saved_bytes), bytes(rates.restored_bytes));
    let (read, written) = (bytes(rates.ssd_read_bytes), bytes(rates.ssd_written_bytes));
    if wide {
        vec![
            Line::from(format!(
                "{:.0} operations/s, {:.0} errors/s, hits {recent} now, {ever} since the start",
                rates.operations, rates.errors
            )),
            Line::from(format!(
                "save {saved}, restore {restored}, ssd read {read}, ssd write {written}"
            )),
        ]
    } else {
        vec![
            Line::from(format!("{:.0} ops/s hits {recent} ({ever})", rates.operations)),
            Line::from(format!("save {saved} restore {restored}")),
        ]
    }
}

/// How a device is; while its pages are searched for, how far that is.
fn health(device: &DeviceView) -> String {
    if device.health != "healthy" || !device.is_recovering() {
        return device.health.to_owned();
    }
    if device.recovery != SsdRecovery::Scanning.label() {
        return "takes in".to_owned();
    }
    let percent = ratio(device.scanned_slots, device.scan_slots) * 100.0;
    format!("scan {percent:.0}%")
}

fn draw_ssd(frame: &mut Frame<'_>, area: Rect, snapshot: &Snapshot, wide: bool, tall: bool) {
    let health_style = |health: &str| match health {
        "healthy" => Style::new().fg(Color::Green),
        "off" => Style::new().fg(Color::Red),
        _ => Style::new().fg(Color::Yellow),
    };
    if !tall {
        let unwell = snapshot.ssd.iter().find(|device| device.health != "healthy");
        let worst = unwell.or_else(|| snapshot.ssd.iter().find(|device| device.is_recovering()));
        let health = worst.map_or_else(|| "healthy".to_owned(), health);
        let used: u64 = snapshot.ssd.iter().fold(0, |sum, d| sum.saturating_add(d.used_bytes));
        let line = Line::from(vec![
            Span::raw(format!("ssd {} ", rounded(used))),
            Span::styled(health.clone(), health_style(&health)),
        ]);
        return frame.render_widget(Paragraph::new(line), area);
    }
    let rows = snapshot.ssd.iter().take(DEVICE_ROWS_MAX).map(|device| {
        let engine = format!("{}{}", device.engine, if device.direct { "" } else { ", cached" });
        let path = tail(&device.path, if wide { 24 } else { 12 });
        let used = format!("{} of {}", rounded(device.used_bytes), rounded(device.capacity_bytes));
        let flow = format!("{} r {} w", device.reading, device.writing);
        let cells = [
            Cell::new(path),
            Cell::new(used),
            Cell::new(Span::styled(health(device), health_style(&health(device)))),
            Cell::new(flow),
            Cell::new(engine),
        ];
        Row::new(cells.into_iter().take(if wide { 5 } else { 3 }).collect::<Vec<_>>())
    });
    let heading = ["ssd", "used", "health", "in flight", "engine"];
    let widths = [24, 20, 9, 9, 13].map(Constraint::Max);
    let columns = if wide { 5 } else { 3 };
    let table =
        Table::new(rows, widths.into_iter().take(columns)).header(header(&heading[..columns]));
    frame.render_widget(table, area);
}

fn draw_sessions(frame: &mut Frame<'_>, area: Rect, snapshot: &Snapshot, wide: bool) {
    if area.height == 0 {
        return;
    }
    // One row is the heading; the last one says how many are left out.
    let places = usize::from(area.height.saturating_sub(1));
    let all = snapshot.sessions.len();
    let shown = if all > places { places.saturating_sub(1) } else { all };
    let columns = if wide { 8 } else { 4 };
    let mut rows: Vec<Row<'_>> = snapshot.sessions[..shown]
        .iter()
        .map(|session| {
            let ring = snapshot.rings.iter().find(|ring| ring.session == session.id);
            let queued = ring.map_or(0, |ring| ring.requests_queued);
            let unread = ring.map_or(0, |ring| ring.completions_queued);
            let cells = [
                session.id.to_string(),
                session.pid.to_string(),
                session.outstanding.to_string(),
                rounded(session.leased_bytes),
                queued.to_string(),
                unread.to_string(),
                session.requests_submitted.to_string(),
                session.state.to_owned(),
            ];
            Row::new(cells.into_iter().take(columns).collect::<Vec<_>>())
        })
        .collect();
    if shown < all {
        rows.push(Row::new([format!("+{}", all - shown)]));
    }
    let heading = ["session", "pid", "running", "leased", "queued", "unread", "requests", "state"];
    let widths = [8, 9, 8, 11, 7, 7, 12, 9].map(Constraint::Max);
    let table =
        Table::new(rows, widths.into_iter().take(columns)).header(header(&heading[..columns]));
    frame.render_widget(table, area);
}

fn header(names: &[&'static str]) -> Row<'static> {
    Row::new(names.to_vec()).style(Style::new().add_modifier(Modifier::DIM | Modifier::UNDERLINED))
}

/// The end of a path that is too long: the name of its file matters most.
fn tail(path: &str, width: usize) -> String {
    let count = path.chars().count();
    if count <= width {
        return path.to_owned();
    }
    let kept: String = path.chars().skip(count - (width - 1)).collect();
    format!("…{kept}")
}

#[cfg(test)]
mod tests;
