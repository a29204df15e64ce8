// SPDX-License-Identifier: Apache-2.0

package main

import "strconv"

// A value is what one key holds.
type value struct {
	present bool
	bytes   string
}

const (
	ready    = "\x00"
	notReady = "\x01"
)

// change is the sequential specification of one operation on one key, whose present content is
// given: what it leaves behind, and the answer that torch's own server would give.
func change(now value, r record) (value, string) {
	switch r.Op {
	case "set":
		return value{true, r.Value}, ""
	case "append":
		return value{true, now.bytes + r.Value}, ""
	case "cas":
		switch {
		case now.present && now.bytes == r.Expected, !now.present && r.Expected == "":
			return value{true, r.Value}, r.Value
		case !now.present:
			return now, r.Expected // the native server's answer for a key that is missing
		}
		return now, now.bytes
	case "add":
		before, _ := strconv.ParseInt(now.bytes, 10, 64)
		sum := strconv.FormatInt(before+r.Delta, 10)
		return value{true, sum}, sum
	case "delete":
		if now.present {
			return value{}, "1"
		}
		return now, "0"
	}
	panic("no such operation: " + r.Op)
}

// agrees says whether an operation that only looks may have seen this value.
func agrees(seen value, r record) bool {
	switch r.Op {
	case "get":
		if r.Output == nil {
			return !seen.present
		}
		return seen.present && seen.bytes == *r.Output
	case "wait":
		return seen.present
	case "check":
		return seen.present == (*r.Output == ready)
	}
	panic("no such operation: " + r.Op)
}

// answered says whether an operation that changes may have had this answer.
func answered(answer string, r record) bool {
	return r.Return == nil || r.Output == nil || *r.Output == answer
}
