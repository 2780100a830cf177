//! The date that templates ask for, formatted as by `strftime`.

/// A date of the Gregorian calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Date {
    pub year: u16,
    pub month: u8,
    pub day: u8,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

impl Date {
    /// Parses `2025-01-31`.
    pub fn parse(text: &str) -> Option<Date> {
        let mut parts = text.split('-');
        let mut part = |digits: usize| {
            let part = parts.next().filter(|part| part.len() == digits)?;
            part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse::<u16>().ok())?
        };
        let date = Date { year: part(4)?, month: part(2)? as u8, day: part(2)? as u8 };
        let is_day = (1..=12).contains(&date.month) && (1..=date.month_days()).contains(&date.day);
        (parts.next().is_none() && date.year > 0 && is_day).then_some(date)
    }

    fn is_leap(self) -> bool {
        self.year.is_multiple_of(4) && (!self.year.is_multiple_of(100) || self.year.is_multiple_of(400))
    }

    fn month_days(self) -> u8 {
        match self.month {
            2 if self.is_leap() => 29,
            2 => 28,
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        }
    }

    /// The day of the year, from 1.
    fn year_day(self) -> u16 {
        let before = (1..self.month).map(|month| u16::from(Date { month, ..self }.month_days()));
        before.sum::<u16>() + u16::from(self.day)
    }

    /// Monday is 0.
    fn weekday(self) -> usize {
        let years = u32::from(self.year) - 1;
        let days = years * 365 + years / 4 - years / 100 + years / 400 + u32::from(self.year_day());
        ((days + 6) % 7) as usize
    }

    /// Formats midnight of the day as `strftime` does. Text that is no directive stays as it is.
    pub(super) fn formatted(self, format: &str) -> String {
        let mut out = String::new();
        let mut rest = format.chars().peekable();
        while let Some(character) = rest.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            let unpadded = rest.next_if_eq(&'-').is_some();
            let two = |value: u16| if unpadded { value.to_string() } else { format!("{value:02}") };
            let (month, day) = (u16::from(self.month), u16::from(self.day));
            let month_name = MONTHS[usize::from(self.month) - 1];
            let written = match rest.next() {
                Some('d') => two(day),
                Some('m') => two(month),
                Some('y') => two(self.year % 100),
                Some('Y') => self.year.to_string(),
                Some('b') => month_name[..3].into(),
                Some('B') => month_name.into(),
                Some('a') => DAYS[self.weekday()][..3].into(),
                Some('A') => DAYS[self.weekday()].into(),
                Some('j') if unpadded => self.year_day().to_string(),
                Some('j') => format!("{:03}", self.year_day()),
                Some('H' | 'M' | 'S') => two(0),
                Some('I') => two(12),
                Some('p') => "AM".into(),
                Some('e') => format!("{day:>2}"),
                Some('F') => format!("{:04}-{month:02}-{day:02}", self.year),
                Some('%') => "%".into(),
                Some(other) => format!("%{other}"),
                None => "%".into(),
            };
            out.push_str(&written);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_written_as_strftime_does() {
        let date = Date::parse("2024-02-29").unwrap();
        assert_eq!(
            date.formatted("%A %a %d %B %b %Y %y %m %j %-d %% %H:%M %Q"),
            "Thursday Thu 29 February Feb 2024 24 02 060 29 % 00:00 %Q"
        );
        assert_eq!(Date::parse("2025-01-05").unwrap().formatted("%a %-d %e %F"), "Sun 5  5 2025-01-05");
        for wrong in
            ["2023-02-29", "2024-13-01", "2024-1-01", "24-01-01", "2024-01-00", "2024-01-01-01", "today", ""]
        {
            assert_eq!(Date::parse(wrong), None, "{wrong}");
        }
    }
}
