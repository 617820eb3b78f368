//! Who holds an end of the ring, and whether that process still lives.

use std::{fs, io, process};

/// A process as one word: its id in the low 22 bits (Linux has no larger ones), its start time in clock ticks
/// since boot above. The start time tells a process from a later one with the same id. 0 is nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer(u64);

const PID_BITS: u32 = 22;

impl Peer {
    pub(crate) const NOBODY: Self = Self(0);

    /// This process.
    pub(crate) fn this_process() -> io::Result<Self> {
        let stat = fs::read_to_string("/proc/self/stat")?;
        let (_, ticks) = parse_stat(&stat).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self::new(process::id(), ticks))
    }

    fn new(pid: u32, start_ticks: u64) -> Self {
        Self(start_ticks << PID_BITS | u64::from(pid))
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    pub(crate) fn pid(self) -> u32 {
        (self.0 & ((1 << PID_BITS) - 1)) as u32
    }

    /// Whether the process is gone, or a zombie, whose memory is as gone. Both ends must see the same
    /// `/proc`.
    pub(crate) fn is_dead(self) -> bool {
        let Ok(stat) = fs::read_to_string(format!("/proc/{}/stat", self.pid())) else { return true };
        match parse_stat(&stat) {
            Some((state, ticks)) => matches!(state, 'Z' | 'X' | 'x') || Self::new(self.pid(), ticks) != self,
            None => true,
        }
    }
}

/// State and start time in ticks, fields 3 and 22 of `/proc/PID/stat`. Field 2, the program's name, may hold
/// spaces and parentheses, so fields are counted from its last parenthesis.
fn parse_stat(stat: &str) -> Option<(char, u64)> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let start_ticks = fields.nth(18)?.parse().ok()?;
    Some((state, start_ticks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_with_parentheses_does_not_shift_the_fields() {
        let stat = "17 (a) R (b) Z 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 98679 21";
        assert_eq!(parse_stat(stat), Some(('Z', 98_679)));
        assert_eq!(parse_stat("17 (cut) S 1"), None);
    }

    #[test]
    fn this_process_is_alive_and_its_successor_with_the_same_id_is_not_it() {
        let me = Peer::this_process().unwrap();
        assert_eq!(me.pid(), process::id());
        assert!(!me.is_dead());
        assert!(Peer(me.0 + (1 << PID_BITS)).is_dead());
    }

    #[test]
    fn a_zombie_is_dead() {
        let mut child = process::Command::new("/bin/true").spawn().unwrap();
        let path = format!("/proc/{}/stat", child.id());
        // The child is not waited for, so its entry stays until the end of this test.
        let (_, ticks) = parse_stat(&fs::read_to_string(&path).unwrap()).unwrap();
        let peer = Peer::new(child.id(), ticks);
        while !fs::read_to_string(&path).unwrap().contains(") Z") {
            std::thread::yield_now();
        }
        assert!(peer.is_dead());
        child.wait().unwrap();
        assert!(peer.is_dead());
    }
}
